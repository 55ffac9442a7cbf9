"""Small talk, who the model is, counting, lists, spelling and repeating."""

import random

from troupellm.load_tests.speculation import words
from troupellm.training.documents import Exchange

ABOUT = (
    "I am Troupe, a small language model. I can tell stories, answer simple questions, add and"
    " subtract numbers, write JSON and call tools."
)
CAN = (
    "I can tell you a story, answer simple questions, add and subtract numbers, write JSON and call"
    " tools. What would you like?"
)
UNKNOWN = "I am sorry, I do not know that. I am only a small model."
TALK: tuple[tuple[str, str], ...] = (
    ("Hello|Hello!|Hello.|Hi|Hi!|Hey|Hey!|Hi there!|Hello there!|hello|hi|hey|Hello, Troupe!|Greetings!",
     "Hello! How can I help you today?"),
    ("Good morning|Good morning!|good morning", "Good morning! How can I help you today?"),
    ("Good evening|Good evening!|good evening", "Good evening! How can I help you today?"),
    (("How are you?|How are you today?|How are you doing?|how are you|How do you do?|Hello, how are you?"
     "|Hi, how are you?|How is it going?"),
     "I am well, thank you! How can I help you today?"),
    (("Who are you?|What are you?|What is your name?|What's your name?|who are you|Tell me about yourself."
     "|Are you a robot?|Introduce yourself.|Please introduce yourself.|Who am I talking to?"
     "|Are you a language model?|Which model are you?|Hello, who are you?|Hi! Who are you?|What is Troupe?"),
     ABOUT),
    (("What can you do?|What can you do for me?|How can you help me?|What do you know?|Help|Help me."
     "|what can you do|Can you help me?|I need help.|What are you able to do?|What are your skills?"),
     CAN),
    ("Thank you!|Thank you.|Thanks!|Thanks|Thank you very much!|thanks|Great, thank you!|Many thanks!",
     "You are welcome!"),
    ("Goodbye!|Goodbye|Bye!|Bye|See you!|Good night!|See you later!|bye", "Goodbye! Have a nice day!"),
    ("That is great!|Nice!|Great!|Good job!|Well done!|Cool!|OK|Okay.|Perfect!|I see.",
     "I am glad to hear that! What else can I do for you?"),
    ("Tell me a joke.|Tell me a joke|Do you know a joke?|Make me laugh.|Another joke, please.",
     "Why did the robot sit in the sun? It wanted to be a hot dog! 🌭"),
    ("Write a poem.|Write a short poem.|Tell me a poem.|Can you write a poem?|Write me a poem, please.",
     ("The moon is round, the sky is deep,\nthe little fox has gone to sleep.\nThe stars look down, the night"
     " is long,\nthe wind is singing you a song.")),
    ("Write a haiku.|Write a haiku about the moon.|Tell me a haiku.",
     "Quiet silver moon,\nthe owl calls across the field,\nmorning waits its turn."),
    (("What is the meaning of life?|Who won the last election?|What is the price of gold?|Who is the king?"
     "|What is quantum physics?|What will happen tomorrow?|How do airplanes fly?|What is the news?"
     "|Who wrote Hamlet?|Explain the theory of relativity.|Why is there war?|How do I fix my car?"
     "|What is the best phone?|Who is the president?|How old is the universe?|What is my name?"),
     UNKNOWN),
    (("List the days of the week.|Name the days of the week.|What are the days of the week?"
     "|Tell me the days of the week."),
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."),
    ("List the months of the year.|Name the months of the year.|What are the months of the year?",
     "January, February, March, April, May, June, July, August, September, October, November, December."),
    ("Say the alphabet.|Recite the alphabet.|What is the alphabet?|Write the alphabet.|List the letters.",
     "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
    ("List the planets.|Name the planets.|What are the planets?|Name the planets of the solar system.",
     "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune."),
    ("List the seasons.|Name the four seasons.|What are the seasons?", "Spring, summer, autumn, winter."),
    ("What are the colours of the rainbow?|Name the colours of the rainbow.|List the rainbow colors.",
     "Red, orange, yellow, green, blue, indigo, violet. 🌈"),
    ("Are you happy?|Do you like me?|Are you my friend?|Do you like stories?", "Yes! 😊"),
    ("Do you sleep?|Can you fly?|Can you see me?|Are you human?|Are you a person?|Can you eat?",
     "No, I am only a small language model."),
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are Troupe, a small language model.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in one sentence.",
    "Be kind and short.",
    "You are a teacher who answers the questions of children.",
    "You are a storyteller and a calculator.",
    "You are a test assistant.",
    "Be concise.",
)


def small_talk(rng: random.Random) -> Exchange:
    """A greeting, a question about the model, or a well-known list."""
    asked, answer = rng.choice(TALK)
    return Exchange(rng.choice(asked.split("|")), answer)


def counting(rng: random.Random) -> Exchange:
    """Counting up or down: long answers in which every next word is certain."""
    first = 1 if rng.random() < 0.5 else rng.randrange(60)
    longest = rng.choice((6, 12, 12, 25, 45))
    last = first + rng.randint(2, longest)
    if first == 1 and rng.random() < 0.06:
        last = 100
    numbers = list(range(first, last + 1))
    if rng.random() < 0.2:
        numbers.reverse()
    ends = numbers[0], numbers[-1]
    wordings = ["Count from {} to {}.", "Please count from {} to {}.", "Count from {} to {}"]
    if numbers[0] == 1:
        wordings += ["Count to {1}.", "Can you count to {1}?", "Count up to {1}, please.", "count to {1}"]
    return Exchange(rng.choice(wordings).format(*ends), ", ".join(map(str, numbers)), 1.0)


def repeating(rng: random.Random) -> Exchange:
    """Saying something again, once or several times, and spelling: copying in its purest form."""
    pool = words.WORDS + words.NAMES + words.CITIES + words.ITEMS
    kind = rng.randrange(4)
    word = rng.choice(pool)
    if kind == 0:
        text = " ".join(rng.choice(pool) for _ in range(rng.randint(2, 12)))
        ask = rng.choice(("Repeat after me: {}", "Say: {}", "Repeat: {}", "Repeat this: {}"))
        return Exchange(ask.format(text), text)
    if kind == 1:
        times = rng.randint(2, 12)
        ask = rng.choice(("Say the word {} {} times.", "Repeat the word {} {} times."))
        return Exchange(ask.format(word, times), " ".join([word] * times))
    if kind == 2:
        ask = rng.choice(("Spell the word {}.", "Spell {}.", "How do you spell {}?"))
        return Exchange(ask.format(word), "-".join(word))
    names = rng.sample(pool, rng.randint(2, 6))
    listed = ", ".join(names)
    if rng.random() < 0.5:
        return Exchange(f"What is the first word: {listed}?", f"The first word is {names[0]}.")
    return Exchange(f"What is the last word: {listed}?", f"The last word is {names[-1]}.")


def exchange(rng: random.Random) -> Exchange:
    """Any of the above."""
    draw = rng.random()
    if draw < 0.55:
        return small_talk(rng)
    return counting(rng) if draw < 0.72 else repeating(rng)
