"""Words for keys: 64 adjectives by 64 nouns, common enough for any vocabulary."""

ADJECTIVES = tuple(
    """able amber ancient bitter blue bold brave brief bright broad calm careful cheap clean clear
    clever cold cool curious dark deep dry dusty eager early easy empty faint famous fast fine firm
    flat fresh gentle glad golden grand gray green happy heavy hollow honest huge humble icy idle
    jolly keen kind late lazy light little lively lone loud lucky mellow mild modest narrow
    neat""".split()
)
NOUNS = tuple(
    """anchor apple arrow badge barn basket beach bell bird boat book bottle branch bridge button
    cabin candle canyon castle chair cloud coast corner desert door eagle engine farm feather fence
    field forest fountain garden gate glove hammer harbor hill island jacket kettle ladder lake lamp
    lemon market meadow mirror mountain needle ocean orchard paper pencil pillow planet pocket river
    road ship spoon stone tower""".split()
)
