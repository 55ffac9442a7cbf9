"""The phrases of every relation; ``{s}`` is the subject, ``*`` marks what training never sees.

Four kinds per relation: noun phrases ("the capital of {s}"), direct questions without their mark,
indirect questions ("which city is the capital of {s}") and whole sentences of their own.
"""

PHRASES: dict[str, tuple[str, str, str, str]] = {
    "capital": (
        ("the capital of {s}|the capital city of {s}|{s}'s capital|the name of the capital of {s}|the main city of {s}"
        "|the seat of government of {s}|*{s}'s main city"),
        ("which city is the capital of {s}|what city is {s}'s capital|what is {s} governed from|which city governs {s}"
        "|what capital does {s} have|*which capital belongs to {s}|*what city serves as capital for {s}"),
        "which city is the capital of {s}|what {s}'s capital is|what capital {s} has|*what city governs {s}",
        ("Where is the government of {s}? Name the capital.|{s}: capital?|Capital of {s}?|{s} capital"
        "|For the country {s}, name the capital.|*{s}, capital city?")),
    "continent": (
        ("the continent of {s}|{s}'s continent|the continent where {s} is|the continent that {s} belongs to"
        "|the part of the world where {s} is|*the continent around {s}"),
        ("which continent is {s} in|what continent is {s} on|on which continent is {s}|where in the world is {s}"
        "|on which continent do I find {s}|what continent does {s} lie on|which continent does {s} belong to"
        "|where is {s}|where is {s} located|*which continent is home to {s}|*in what part of the world is {s}"),
        ("on which continent {s} is|which continent {s} is in|where {s} is|on which continent {s} lies"
        "|what continent {s} belongs to|*which continent contains {s}"),
        ("{s} is on which continent?|{s}: which continent?|Continent of {s}?|{s} belongs to which continent?"
        "|*{s} lies on what continent?")),
    "sound": (
        ("the sound of a {s}|the sound a {s} makes|the noise a {s} makes|the noise of the {s}|the cry of a {s}"
        "|*the call of a {s}"),
        ("what sound does a {s} make|what does a {s} say|what does the {s} say|what noise does a {s} make"
        "|which noise does the {s} make|how does a {s} sound|what sound comes from a {s}|how does a {s} go"
        "|*what sound do you hear from a {s}|*how does a {s} talk"),
        "what a {s} says|what sound a {s} makes|how a {s} sounds|what noise the {s} makes|*how a {s} talks",
        ("Imitate a {s}.|Make the sound of a {s}.|When a {s} makes a noise, what is it?|A {s} says what?"
        "|Pretend to be a {s}.|Speak like a {s}.|Be a {s}!|*Act like a {s}.|*Do a {s} impression.")),
    "baby": (
        ("the name of a baby {s}|the word for a baby {s}|the young of a {s}|the name for a young {s}"
        "|the baby of a {s}|the proper word for a young {s}|*the term for a baby {s}"),
        ("what is a baby {s} called|what do you call a baby {s}|how is a baby {s} called|what is a young {s} called"
        "|what do people call a baby {s}|which name does a baby {s} have|what do we call a baby {s}"
        "|*how do you call a young {s}|*what is the child of a {s} called"),
        "what a baby {s} is called|how a young {s} is called|what you call a baby {s}|*what people call a young {s}",
        ("A baby {s} goes by which name?|A baby {s} is a what?|A young {s} is called what?|Baby {s}?"
        "|baby {s} name|*A little {s} is known as what?")),
    "legs": (
        ("the number of legs of a {s}|the number of legs a {s} has|the leg count of a {s}"
        "|*the total of legs on a {s}"),
        ("how many legs does a {s} have|how many legs has a {s}|how many legs does the {s} have"
        "|what number of legs does a {s} have|how many legs are on a {s}|how many legs can a {s} have"
        "|on how many legs does a {s} walk|*how many legs would you count on a {s}|*how many legs do you see on a {s}"),
        ("how many legs a {s} has|on how many legs a {s} walks|what number of legs a {s} has"
        "|*how many legs there are on a {s}"),
        ("Count the legs of a {s}.|Legs of a {s}: how many?|A {s} has how many legs?|Number of legs of a {s}?"
        "|{s} legs?|*A {s} walks on how many legs?")),
    "home": (
        ("the home of a {s}|the home of the {s}|the place where a {s} lives|the house of a {s}"
        "|the name of the home of a {s}|*the dwelling of a {s}"),
        ("where does a {s} live|in what does a {s} live|what place does a {s} live in|where is the home of a {s}"
        "|what is the home of a {s} called|where does the {s} sleep|where is a {s} at home"
        "|*what kind of home has a {s}|*where would I find a {s}"),
        ("where a {s} lives|what the home of a {s} is called|where a {s} is at home|in what a {s} lives"
        "|*where a {s} sleeps"),
        ("A {s} makes its home where?|A {s} lives where?|A {s} lives in a what?|Home of a {s}?"
        "|What is the place called where a {s} lives?|*A {s} stays in what home?")),
    "colour": (
        ("the colour of {s}|the color of {s}|the usual colour of {s}|the normal color of {s}|the colour that {s} has"
        "|*the shade of {s}"),
        ("what colour is {s}|what color is {s}|which colour is {s}|which color has {s}|which colour does {s} have"
        "|of what colour is {s}|what color does {s} have|what colour is {s} usually|what is {s} like in colour"
        "|*what color do you see on {s}|*what color would {s} be"),
        "what colour {s} is|what color {s} is|which colour {s} has|what color {s} has|*of which color {s} is",
        ("{s} is what colour?|Describe the colour of {s}.|{s}: which color?|Could you describe the colour of {s}?"
        "|Color of {s}?|*{s} has what color?")),
    "opposite": (
        ("the opposite of {s}|the contrary of {s}|the word opposite to {s}|the opposite of the word {s}"
        "|an antonym of {s}|the antonym for {s}|the reverse of {s}|*the opposite word to {s}"),
        ("which word is the opposite of {s}|what word means the opposite of {s}|which word is opposite to {s}"
        "|what is opposite to {s}|what is the contrary to {s}|*what word is the contrary of {s}"
        "|*which antonym does {s} have"),
        ("which word means the opposite of {s}|what is opposite to {s}|which word is the contrary of {s}"
        "|*which word is the reverse of {s}"),
        ("If something is not {s}, what is its opposite?|{s} is the opposite of what?|Opposite of {s}?"
        "|The reverse of {s} is what?|{s}, opposite|*{s} versus what?")),
    "plural": (
        ("the plural of {s}|the plural form of {s}|the plural of the word {s}|the word {s} in the plural"
        "|the form for several of {s}|*the plural version of {s}"),
        ("which word is the plural of {s}|how do you write the plural of {s}|what is {s} in the plural"
        "|how do you say {s} in the plural|what is one {s} but two|how does {s} look in the plural"
        "|*how is the plural of {s} written|*what does {s} become in the plural"),
        ("how {s} looks in the plural|which word is the plural of {s}|how to write the plural of {s}"
        "|*how to form the plural of {s}"),
        ("More than one {s}: what is the plural?|Put the word {s} in the plural.|Could you form the plural of {s}?"
        "|One {s}, two what?|Form the plural of {s}.|*Make {s} plural.")),
    "past": (
        ("the past tense of {s}|the past tense of the verb {s}|the past form of {s}|the past of {s}"
        "|the verb {s} in the past tense|the simple past of {s}|*the preterite of {s}"),
        ("which word is the past tense of {s}|what is {s} in the past tense|how do you say {s} in the past"
        "|how do you write {s} in the past tense|how does the verb {s} look in the past"
        "|*what does {s} become in the past|*which past form does {s} have"),
        ("what {s} is in the past tense|how {s} looks in the past|how to say {s} in the past tense"
        "|*how to form the past tense of {s}"),
        ("Put {s} in the past tense.|Today I {s}, yesterday I what?|Could you form the past tense of {s}?"
        "|Yesterday form of the verb {s}: what is the past tense?|Form the past tense of {s}.|Past of {s}?"
        "|*Change {s} to past tense.")),
    "symbol": (
        ("the chemical symbol of {s}|the chemical symbol for {s}|the symbol of {s}|the symbol for {s}"
        "|the symbol of the element {s}|the sign for {s} in chemistry|*the letters for the element {s}"),
        ("which chemical symbol stands for {s}|which symbol does {s} have|what symbol do chemists use for {s}"
        "|how is {s} written in chemistry|which symbol is used for {s}|what letters stand for {s}"
        "|*how do chemists write {s}|*what abbreviation does {s} have"),
        ("which chemical symbol {s} has|how chemists write {s} as a symbol|which symbol stands for {s}"
        "|*what symbol {s} has"),
        ("In the periodic table, what is the symbol of {s}?|Write the chemical symbol of {s}.|Element {s}: symbol?"
        "|Could you write the chemical symbol of {s}?|Symbol of {s}?|*Periodic table: {s}?")),
    "day after": (
        ("the day after {s}|the next day after {s}|the day that follows {s}|the day that comes after {s}"
        "|*the day right after {s}"),
        ("what day comes after {s}|which day follows {s}|what day is it after {s}|which day is next after {s}"
        "|what comes after {s}|what day follows {s}|which weekday comes after {s}"
        "|*what weekday follows {s}|*which day do we have after {s}"),
        "which day comes after {s}|what day follows {s}|what comes after {s}|*which weekday is after {s}",
        ("Today is {s}. What day is tomorrow?|If it is {s} now, which day comes next?|After {s} comes which day?"
        "|If today is {s}, what is tomorrow?|It is {s} today. And tomorrow?|*{s} is followed by which day?")),
    "day before": (
        "the day before {s}|the day that comes before {s}|the day that precedes {s}|*the day right before {s}",
        ("what day comes before {s}|which day was before {s}|what day is it before {s}|what day precedes {s}"
        "|what comes before {s}|which day is before {s}|which weekday comes before {s}"
        "|*what weekday precedes {s}|*which day do we have before {s}"),
        "which day comes before {s}|what day precedes {s}|what comes before {s}|*which weekday is before {s}",
        ("Today is {s}. What day was yesterday?|If it is {s} now, which day came before?|Before {s} comes which day?"
        "|If today is {s}, what was yesterday?|It is {s} today. And yesterday?|*{s} is preceded by which day?")),
    "month after": (
        ("the month after {s}|the next month after {s}|the month that follows {s}|the month that comes after {s}"
        "|*the month right after {s}"),
        ("what month comes after {s}|which month follows {s}|what month is it after {s}|which month is next after {s}"
        "|what comes after {s}|what month follows {s}|*which month do we have after {s}"),
        "which month comes after {s}|what month follows {s}|what comes after {s}|*which month succeeds {s}",
        ("It is {s}. What is the next month?|If it is {s} now, which month comes next?|After {s} comes which month?"
        "|If this month is {s}, what is next month?|*{s} is followed by which month?")),
    "month days": (
        "the number of days in {s}|the number of days of {s}|the length of {s} in days|*the day count of {s}",
        ("how many days does {s} have|how many days are in {s}|how many days has {s}|how long is {s} in days"
        "|how many days are there in {s}|what number of days does {s} have|how many days long is {s}"
        "|*how many days does the month of {s} have|*how many days go into {s}"),
        "how many days {s} has|how many days are in {s}|how long {s} is in days|*how many days the month {s} has",
        ("{s} is how many days long?|{s} has how many days?|Count the days of {s}.|Days in {s}?"
        "|*{s} lasts how many days?")),
    "sides": (
        ("the number of sides of a {s}|the number of sides a {s} has|the number of sides on a {s}"
        "|*the side count of a {s}"),
        ("how many sides does a {s} have|how many sides has a {s}|what number of sides does a {s} have"
        "|how many sides are on a {s}|how many sides can a {s} have|how many sides are there in a {s}"
        "|*how many sides would you count on a {s}|*how many sides make a {s}"),
        ("how many sides a {s} has|what number of sides a {s} has|how many sides are in a {s}"
        "|*how many sides there are on a {s}"),
        ("Count the sides of a {s}.|A {s} has how many sides?|Sides of a {s}: how many?|Number of sides of a {s}?"
        "|The number of sides on a {s} is what?|*A {s} is made of how many sides?")),
    "hello": (
        ("hello in {s}|the word for hello in {s}|the {s} word for hello|the {s} greeting|the {s} for hello"
        "|*the usual greeting in {s}"),
        ("how do you say hello in {s}|how do I say hello in {s}|how do people say hello in {s}|how is hello said in {s}"
        "|what do people say for hello in {s}|how do I greet somebody in {s}|how would you say hello in {s}"
        "|*how can one greet people in {s}|*what does hello become in {s}"),
        ("how to say hello in {s}|how hello is said in {s}|how to greet somebody in {s}"
        "|*how people greet each other in {s}"),
        ("Say hello in {s}.|Translate hello into {s}.|Could you greet me with hello in {s}?|Greet me in {s}."
        "|What do people in the {s} language say for hello?|In {s}, what is hello?|*Put hello into {s}.")),
    "thanks": (
        ("thank you in {s}|the word for thank you in {s}|the {s} word for thank you|the {s} for thanks"
        "|*the usual thanks in {s}"),
        ("how do you say thank you in {s}|how do I say thank you in {s}|how do people say thanks in {s}"
        "|how is thank you said in {s}|how do I thank somebody in {s}|how would you say thank you in {s}"
        "|*how can one thank people in {s}|*what does thank you become in {s}"),
        ("how to say thank you in {s}|how thank you is said in {s}|how to thank somebody in {s}"
        "|*how people thank each other in {s}"),
        ("Say thank you in {s}.|Translate thank you into {s}.|Could you translate thank you into {s}?"
        "|Thank me in {s}.|In {s}, how is thank you said?|In {s}, what is thank you?|*Put thank you into {s}.")),
    "emoji": (
        "the {s} emoji|the emoji of a {s}|the emoji for {s}|a {s} emoji|an emoji of the {s}|*an emoji that shows a {s}",
        ("which emoji shows a {s}|what emoji stands for {s}|which emoji is the {s}|what does the {s} emoji look like"
        "|*which emoji means {s}|*what emoji do I use for a {s}"),
        "how the {s} emoji looks|which emoji shows a {s}|*what emoji means {s}",
        ("Show me the {s} emoji.|Send me a {s} emoji.|I want to see the emoji of a {s}.|Draw the {s} emoji."
        "|Could you draw the {s} emoji?|Let me see the {s} emoji.|Can I get the {s} emoji?|{s} emoji|Print a {s} emoji."
        "|*Type a {s} emoji.")),
    "currency": (
        ("the currency of {s}|{s}'s currency|the currency used in {s}|the money of {s}|the money used in {s}"
        "|*the legal tender of {s}"),
        ("which currency is used in {s}|what money is used in {s}|what currency does {s} have"
        "|what currency do people use in {s}|which currency do you pay with in {s}|which currency does {s} use"
        "|what do people pay with in {s}|*which money do shops in {s} take|*what money has {s}"),
        ("which currency {s} uses|what money people use in {s}|which currency is used in {s}"
        "|*what one pays with in {s}"),
        ("People in {s} pay with which currency?|{s}: which currency?|Currency of {s}?|In {s} you pay with what?"
        "|*In {s}, what money is used?")),
}  # fmt: skip
NOUN_FRAMES = (
    "What is {x}?|What's {x}?|Name {x}.|Tell me {x}.|Give me {x}.|Could you name {x}?|Can you name {x}?"
    "|Do you know {x}?|I need {x}.|I want to know {x}.|I would like to know {x}.|Please tell me {x}.|Please name {x}."
    "|Please give me {x}.|Say {x}.|Can you tell me {x}?|Could you tell me {x}?|Could you give me {x}?"
    "|Would you name {x}?|What would be {x}?|{x}|{x}?|{x}, please|{x} is|{x} is what?|Complete: {x} is ..."
    "|Finish the sentence: {x} is|Any idea what {x} is?|Do you know what {x} is?|Tell me what {x} is."
    "|I wonder what {x} is.|I am looking for {x}.|Could you say what {x} is?|What might {x} be?|Write {x}."
    "|I need to know {x}.|Can I have {x}?|Find {x}.|State {x}.|What exactly is {x}?|What was {x} again?"
    "|*Please say {x}.|*I'd love to know {x}.|*Remind me of {x}.|*May I ask for {x}?|*Let me know {x}."
    "|*Are you able to name {x}?"
)
CLAUSE_FRAMES = (
    "Do you know {x}?|Tell me {x}.|Can you tell me {x}?|Could you tell me {x}?|Please tell me {x}.|I want to know {x}."
    "|I would like to know {x}.|I'd like to know {x}.|I wonder {x}.|Any idea {x}?|Say {x}.|I need to know {x}."
    "|Please explain {x}.|I forgot {x}.|Could you say {x}?|Can you say {x}?|Answer me {x}.|I have to find out {x}."
    "|I don't know {x}.|Do you remember {x}?"
    "|*I was wondering {x}.|*Would you happen to know {x}?|*Remind me {x}.|*Let me know {x}."
)
QUESTION_FRAMES = "{x}?|{x}?|{x}?|{x}|So {x}?|And {x}?|{x}, please?|Quick: {x}?|*Just asking, {x}?|*Well, {x}?"
OTHER_FRAMES = "{x}"
PREFIXES = (
    "Hi! |Hello. |Hello! |Hey, |Hey! |OK. |Okay, |Good morning. |Please tell me: |Can you tell me: |Tell me, "
    "|Quick question: |Question: |A question: |I have a question. |One more question: |Do you know? |And now: |Next: "
    "|Now |Thanks. |Help me: |Please help me. |Hi Troupe! |Let me ask you something. |A quiz question: "
    "|For my homework: |I am curious: |*Excuse me, |*My teacher asks: |*Dear model, |*Yo! "
)
SUFFIXES = (
    " Thanks!| Thank you.| Please.| I forgot.| Answer briefly.| It is for school.| Do you know?| Please help."
    "| Just tell me.| I am curious.|* Cheers!|* I can't remember.|* Be quick!"
)
FOLLOW_UPS = (
    "And {x}?|What about {x}?|How about {x}?|And what about {x}?|And for {x}?|Now {x}.|Now for {x}?|Same for {x}."
    "|The same for {x}, please.|{x}?|And now {x}?|OK, and {x}?|*Then {x}?|*Also {x}?"
)
MENTIONS = {"sound": "a {s}", "baby": "a {s}", "legs": "a {s}", "home": "a {s}", "sides": "a {s}", "emoji": "the {s}"}
