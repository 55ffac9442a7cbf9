"""Word lists that several generators share."""


def _list(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(separator))


NAMES = _list(
    """Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa
    Sam Tina Uma Victor Wendy Xavier Yara Zoe Alice Bob Carol Daniel Ella Frank Gina Hugo Iris James
    Karen Lucas Maria Nina Oscar Peter Ruth Sofia Tom Vera Walter José Zoë René"""
)
CITIES = _list(
    """Paris,London,Berlin,Rome,Madrid,Vienna,Oslo,Tokyo,Cairo,Lima,Dublin,Prague,Lisbon,Athens,
    Warsaw,Boston,Chicago,Delhi,Sydney,Toronto,Zürich,Málaga,New York,Hamburg,Milan,Kyoto,Geneva,
    Seattle,Denver,Bogotá,Seoul,Helsinki,Stockholm,Copenhagen,Brussels,Budapest""",
    ",",
)
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "pink", "brown")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ITEMS = _list(
    """lamp chair table book cup bag hat coat ball kite clock phone pen bike boat shoe shirt ring box
    bell drum guitar camera bottle knife spoon pillow blanket candle umbrella"""
)
ANIMALS = ("cat", "dog", "rabbit", "horse", "parrot", "hamster", "turtle", "goldfish", "mouse")
JOBS = ("teacher", "doctor", "baker", "farmer", "pilot", "nurse", "singer", "painter", "driver")
FOODS = ("pizza", "soup", "bread", "rice", "salad", "pasta", "cake", "apple", "cheese", "tea")
WORDS = _list(
    """apple river stone cloud garden window summer winter music paper silver golden forest island
    bridge letter mirror castle flower market ocean planet rocket school spring thunder tiger train
    valley village whisper wonder yellow zebra coffee dinner engine family finger guitar"""
)
