"""A tokenizer for tests: one id a character, within the reference's vocabulary of 110."""


class Characters:
    """From 2 on: the characters from space to "w", and a stand-in for every further id, so that
    whatever a model says can be said back. Ids below 2 are no text."""

    def encode(self, text, add_special_tokens=True):
        return [ord(c) - 256 if ord(c) > 256 else 2 + (ord(c) - 32) % 88 for c in text]

    def decode(self, ids):
        return "".join(chr(30 + i if i < 90 else 256 + i) for i in map(int, ids) if i >= 2)
