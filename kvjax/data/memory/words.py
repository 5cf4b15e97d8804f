"""The vocabulary of the synthetic benchmarks: common words, so that any model can say the answer.

No word is part of another one, whichever list it stands in: an answer that is looked for as a
substring is found in no other answer. Which words belong together is drawn anew for every episode.
"""

import random

PEOPLE = tuple(
    """Adam Alice Andrew Arthur Audrey Barbara Brian Carlos Chloe Claire Daniel David Diana Edward
    Elena Emily Felix Frank George Grace Hannah Harry Helen Henry Isaac Ivan Jack Jacob James Julia
    Karen Kevin Laura Leo Linda Lucas Maria Martin Megan Miguel Molly Nancy Nathan Nina Oliver
    Oscar Paula Peter Rachel Robert Ruth Samuel Sarah Simon Sofia Steven Susan Teresa Thomas Victor
    Walter Wendy William Zoe""".split()
)
CITIES = tuple(
    """Athens Berlin Boston Bristol Brussels Cairo Chicago Cologne Dallas Delhi Denver Dublin
    Florence Geneva Glasgow Hamburg Houston Kyoto Leeds Lima Lisbon London Madrid Manila Miami Milan
    Moscow Munich Naples Nairobi Oxford Paris Phoenix Prague Rome Seattle Seoul Sydney Tokyo
    Toronto Venice Vienna Warsaw Zurich""".split()
)
CONTINENTS = {
    "Africa": "Algeria Angola Egypt Ghana Kenya Morocco Nigeria Senegal Tanzania Tunisia",
    "America": "Argentina Bolivia Brazil Canada Chile Colombia Cuba Ecuador Mexico Peru",
    "Asia": "China India Indonesia Malaysia Mongolia Nepal Pakistan Singapore Thailand Vietnam",
    "Europe": "Austria Belgium Croatia Denmark Finland France Greece Hungary Norway Portugal",
}
COUNTRIES = tuple(name for names in CONTINENTS.values() for name in names.split())
LANGUAGES = tuple(
    """Arabic Bengali Danish Dutch English Finnish French German Hebrew Hindi
    Irish Italian Japanese Korean Latin Norwegian Persian Polish Russian Spanish Swahili Swedish
    Turkish Welsh""".split()
)
SPORTS = tuple(
    """badminton baseball basketball boxing chess cricket cycling fencing golf handball hockey judo
    karate rowing rugby running sailing skating skiing soccer surfing swimming tennis volleyball
    wrestling""".split()
)
FOODS = tuple(
    """bacon beans bread burgers butter cheese cookies curry dumplings eggs honey lasagna lentils
    mushrooms noodles omelettes pancakes pasta pizza potatoes rice salad salmon soup steak sushi
    tacos toast waffles yogurt""".split()
)
INSTRUMENTS = tuple(
    """accordion banjo cello clarinet drums flute guitar harmonica harp mandolin oboe organ piano
    saxophone trombone trumpet tuba ukulele violin xylophone""".split()
)
JOBS = tuple(
    """baker barber carpenter chef dancer dentist doctor driver electrician farmer fisherman
    gardener judge lawyer librarian mechanic nurse painter pilot plumber poet police sailor singer
    surgeon tailor teacher waiter writer""".split()
)
ANIMALS = tuple(
    """bear camel cat crow dog dolphin donkey duck eagle elephant falcon fox frog goat hamster horse
    kangaroo lion lizard monkey owl panda parrot penguin rabbit sheep snake tiger turtle wolf
    zebra""".split()
)
COLORS = tuple(
    "beige black blue brown crimson gray green orange pink purple red silver white yellow".split()
)
PLANTS = tuple("bamboo cactus daisy fern ivy lavender lily maple orchid rose tulip".split())

WORDS = (*PEOPLE, *CITIES, *COUNTRIES, *LANGUAGES, *SPORTS, *FOODS, *INSTRUMENTS, *JOBS, *ANIMALS,
         *COLORS, *PLANTS, *CONTINENTS)  # fmt: skip
_KNOWN = tuple(word.lower() for word in WORDS)
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def phrases(text: str) -> tuple[str, ...]:
    """What stands between the bars of `text`."""
    return tuple(phrase.strip() for phrase in text.split("|"))


def continent(country: str) -> str:
    """The continent of one of `COUNTRIES`."""
    return next(name for name, members in CONTINENTS.items() if country in members.split())


def nonces(rng: random.Random, count: int) -> list[str]:
    """`count` different names that mean nothing, three syllables each, with no word in them."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))
        if not any(word in name for word in _KNOWN):
            names[name.capitalize()] = None
    return list(names)
