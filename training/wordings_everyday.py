"""Whole sentences in which people ask for a fact, beside the frames and phrases of the grammar.

``{s}`` is the subject, ``*`` marks what training never sees.
"""

SENTENCES: dict[str, str] = {
    "capital": (
        "I'm planning a trip to {s}, what's the capital there?|What's {s} capital called?|Which city would I call "
        "the capital if I lived in {s}?|The president of {s} lives in the capital, which is?|In {s}, which city is "
        "the capital?|If I fly to the capital of {s}, where do I land?|Which city should I put down as {s}'s "
        "capital?|Is there a capital in {s}, and what is it?|My map of {s} has no capital on it, what is it?|Where "
        "does the government of {s} sit?|The parliament of {s} meets in which city?|Which place is the capital city"
        " in {s}?|I always forget the capital of {s}.|Help me with geography: {s}, which capital?|Someone asked me "
        "for the capital of the country {s}.|Which capital city goes with {s}?|In which city does {s} have its "
        "government?|Country: {s}. Capital:|*On a quiz they asked the capital of {s}, which city is right?"
    ),
    "continent": (
        "Is {s} in Europe, Asia, or where?|Which of the continents would I visit if I went to {s}?|If I travel to "
        "{s}, which continent am I on?|Is {s} a country in Africa, America or what?|The country {s}, on which "
        "continent is it?|To which continent should I fly for {s}?|What part of the world does {s} belong to?|Which"
        " continent would I find {s} on?|Looking at a map, on which continent is {s}?|My atlas lists {s} under "
        "which continent?|Country: {s}. Continent:|Where on the globe is {s}?|People from {s} live on which "
        "continent?|Which continent has {s} in it?|Does {s} lie in Europe, Africa or somewhere else?|Of which "
        "continent is {s} a part?|*I am moving to {s}, which continent will I live on?"
    ),
    "sound": (
        "My kid wants to hear what a {s} sounds like.|So what kind of noise would a {s} make?|If I hear a {s}, what"
        " do I hear?|Can you do the sound of a {s}?|Which animal sound belongs to the {s}?|In a story, what would a"
        " {s} say?|A {s} opens its mouth and says?|How would a {s} speak?|Old MacDonald had a {s}, and it said "
        "what?|What do we hear when a {s} is near?|If a {s} could greet me, what would it say?|The animal {s} makes"
        " which sound?|What is a {s} saying all day?|Write the noise that a {s} makes.|What do {s} noises sound "
        "like?|Imagine you are a {s}, what do you say?|Animal: {s}. Sound:|*In the picture book a {s} says what?"
    ),
    "baby": (
        "When a {s} has a baby, what is it called?|Is there a special word for baby {s}?|The mother is a {s}, so "
        "the baby is a what?|If a {s} is very young, how do we call it?|What name do we give to the young of the "
        "{s}?|A small {s} that was just born is called what?|How do I call a {s} that is still a baby?|A {s} and "
        "her baby: what is the baby called?|Which word means a young {s}?|The offspring of a {s} is called what?|A "
        "newborn {s} is called a what?|In English, what is a baby {s}?|What is the young animal of a {s} "
        "called?|Before it grows up, a {s} is called what?|Which special name has the baby of a {s}?|The kid of a "
        "{s} is called what?|Animal: {s}. Baby:|*At the zoo a {s} was born, what is it called?"
    ),
    "legs": (
        "Hey how many legs does a {s} actually have?|If I look at a {s}, how many legs will I see?|When I draw a "
        "{s}, how many legs should it get?|A {s} needs how many shoes, one for each leg?|How many legs does the "
        "animal {s} have?|Does a {s} have four legs, six legs or how many?|The {s} walks on how many legs?|Is it "
        "true that a {s} has legs, and how many?|Say how many legs a {s} has.|How many of its legs does a {s} "
        "use?|In biology, how many legs has a {s}?|I found a {s}, how many legs should it have?|All together, how "
        "many legs are there on one {s}?|With how many legs was a {s} born?|Animal: {s}. Legs:|*I am building a toy"
        " {s}, how many legs does it need?"
    ),
    "home": (
        "What do you call the thing a {s} lives in?|Where do you usually find a {s} living?|If I look for a {s} at "
        "home, where do I look?|Which house does a {s} have?|In which kind of home does the {s} live?|Where will a "
        "{s} go when it wants to sleep at home?|A {s} builds or has a home, what is it called?|The animal {s} lives"
        " in what?|What is the word for where a {s} lives?|Where do {s} families live?|What name has the house of a"
        " {s}?|In nature or on a farm, where does a {s} live?|Where does the {s} go home to?|A {s} comes home to "
        "its what?|Animal: {s}. Home:|*My story needs the home of a {s}, what is it called?"
    ),
    "colour": (
        "If I paint {s}, which color should I take?|Is there a typical color for {s}?|Which crayon do I need for "
        "{s}?|When I think of {s}, which colour is it?|What colour would you paint {s}?|Is {s} red, green, blue or "
        "what colour?|Tell me how {s} looks, I mean the colour.|In pictures, what color is {s}?|Which colour comes "
        "to mind for {s}?|I want to draw {s}, what colour?|The colour you see when you look at {s} is "
        "which?|Everybody knows what colour {s} is, so what is it?|What colour does {s} usually have?|By its "
        "colour, {s} is what?|Does {s} have a colour, and which?|Thing: {s}. Colour:|*My child asks which colour is"
        " right for {s}."
    ),
    "opposite": (
        "I need a word that means the opposite of {s}.|Not {s} but the opposite, what is the word?|The word {s} has"
        " an opposite, which one?|If it isn't {s}, it is the opposite, namely what?|What is the exact opposite of "
        "the word {s}?|Which word says the opposite of {s}?|Give the antonym: {s}.|{s} and its opposite, which "
        "is?|What do you say when you mean the opposite of {s}?|In a crossword: the opposite of {s}.|Turn {s} into "
        "its opposite.|{s} is one thing, the opposite is what?|Find an antonym for the word {s}.|Which antonym "
        "belongs to {s}?|What would be the contrary of the word {s}?|Word: {s}. Opposite:|*My crossword wants the "
        "opposite of {s}."
    ),
    "plural": (
        "How would I spell the plural of {s} correctly?|If there are many, do I write {s} or something else?|One "
        "{s}, and then two of them, what is the word?|I have one {s}, you have three, what do you have?|What do I "
        "write for several of the word {s}?|In English, what is the plural of {s}?|When there is more than one {s},"
        " what do we say?|Spell the plural of the noun {s}.|Which plural does the noun {s} have?|There is one {s}. "
        "There are many what?|The noun {s}, but more than one of it.|Is there a special plural for {s}?|Turn {s} "
        "into the plural.|How do we call many of {s}, in the plural?|What's the right plural form for {s}?|Noun: "
        "{s}. Plural:|*My homework says one {s}, many what?"
    ),
    "past": (
        "I {s} today, but what is it for yesterday?|What's the correct past tense for {s} in English?|How do I say "
        "that I did it yesterday, with the verb {s}?|Every day I {s}, and last week I what?|The verb {s}, but in "
        "the past tense.|Which word do I use for {s} when it happened yesterday?|Today they {s}, a year ago they "
        "what?|Which past tense has the verb {s}?|Turn the verb {s} into the past tense.|Is the verb {s} irregular,"
        " and what is its past tense?|For something over and done, what do I say instead of {s}?|How do you spell "
        "the past tense of {s}?|In a story about the past, {s} turns into what?|Now we {s}. Before, we what?|Write "
        "the past tense of to {s}.|Verb: {s}. Past tense:|*My homework: {s} in the past tense."
    ),
    "symbol": (
        "Which abbreviation is {s} on the periodic table?|How do you abbreviate the element {s}?|In the periodic "
        "table, how is {s} written?|What letters do I look for to find {s} in the periodic table?|The element {s} "
        "is written with which letters?|In a formula, what do I write for {s}?|How is the element {s} "
        "shortened?|What is {s} in chemical letters?|In chemistry class, what is the short form of {s}?|Which "
        "letter or letters mean {s} in chemistry?|A chemist writes {s} as what?|The periodic table shows {s} as "
        "what?|What's the abbreviation for the element {s}?|Which chemical sign has the element {s}?|The short name"
        " of {s} in chemistry is what?|Element: {s}. Symbol:|*In the lab a jar of {s} carries which symbol?"
    ),
    "day after": (
        "Yesterday was {s}, so what day is it today?|When {s} is over, what day starts?|On the morning after {s}, "
        "what day is it?|{s} ends at midnight, and then it is what day?|One day later than {s} is which day?|After "
        "I sleep on {s}, which day do I wake up to?|What day is one day past {s}?|If my party is on the day "
        "following {s}, which day is that?|Once {s} has passed, what day is it?|Counting on from {s}, the next day "
        "is what?|What is the first day after {s}?|In the week, what comes right behind {s}?|The weekday that "
        "follows {s} is which?|Add one day to {s}.|*We meet a day later than {s}, when is that?"
    ),
    "day before": (
        "Tomorrow is {s}, so what day is it today?|What was the day just before {s}?|On the evening before {s}, "
        "what day is it?|One day earlier than {s} is which day?|{s} begins at midnight, what day was it until "
        "then?|If my party is on the day preceding {s}, which day is that?|What is the last day before {s}?|Going "
        "one day back from {s}, what day is it?|In the week, what comes right in front of {s}?|The weekday that "
        "precedes {s} is which?|What day is one day ahead of {s}, I mean before it?|Which day ends when {s} "
        "begins?|Take one day away from {s}.|Before it was {s}, it was what day?|*We meet a day earlier than {s}, "
        "when is that?"
    ),
    "month after": (
        "Once {s} is over, what month starts?|Last month was {s}, which one is it now?|When the calendar page of "
        "{s} is torn off, which month is next?|One month later than {s} is which month?|In the year, what comes "
        "right behind {s}?|Counting on from {s}, the next month is what?|Which month begins when {s} ends?|After "
        "the last day of {s}, which month begins?|Add one month to {s}.|If {s} was last month, what is this "
        "month?|What month is one month past {s}?|{s} ends, and then it is which month?|The calendar shows {s}, "
        "what does the next page show?|What is the first month after {s}?|*School starts the month following {s}, "
        "when is that?"
    ),
    "month days": (
        "Does {s} have 30 or 31 days, or something else?|When does {s} end, after how many days?|For how many days "
        "does {s} go on?|If I stay for all of {s}, how many days do I stay?|The calendar for {s} has how many "
        "days?|Does {s} have 28, 30 or 31 days?|On which number does {s} end?|How many days do I count in the month"
        " {s}?|From the first to the last of {s}, how many days is that?|The month of {s}: how many days?|How many "
        "days long is the month of {s}?|In the month {s}, how many days are there?|A whole {s} has how many "
        "days?|What is the last number on the calendar page of {s}, how many days has it?|Month: {s}. Days:|*I get "
        "paid per day, how many days are there in {s}?"
    ),
    "sides": (
        "If I draw a {s}, how many sides do I need?|A {s} in geometry, how many sides is that?|How many lines do I "
        "draw for a {s}?|A shape called {s} has how many sides?|If a shape is a {s}, how many sides has it?|How "
        "many edges go around a {s}?|In maths, how many sides does the {s} have?|Does a {s} have three, four or how"
        " many sides?|I cut a {s} out of paper, how many sides has it?|Walking around a {s}, how many sides do I "
        "pass?|The shape {s}: how many sides?|With how many sides do you draw a {s}?|What makes a {s} a {s}, how "
        "many sides?|Say how many sides a {s} has.|Shape: {s}. Sides:|*My garden is a {s}, how many sides does it "
        "have?"
    ),
    "hello": (
        "I'm meeting somebody who speaks {s}, how do I say hello?|Teach me to say hello in {s}!|What is the {s} way"
        " to say hello?|My neighbour speaks {s}, how do I greet her?|If somebody speaks only {s}, how do I say "
        "hello to them?|What would a {s} speaker say for hello?|Which word do I use to greet someone in {s}?|How "
        "does one greet in {s}?|Learn me a greeting: hello, in {s}.|I want to greet my friend in {s}.|The first "
        "word in {s} class is hello, what is it?|In the {s} language, hello is what?|Hello, but in {s}?|What do I "
        "say in {s} when I meet someone?|Language: {s}. Hello:|*On the phone in {s}, how do I say hello?"
    ),
    "thanks": (
        "A {s} friend helped me, how do I say thank you?|Teach me to say thank you in {s}!|What is the {s} way to "
        "say thank you?|My neighbour speaks {s}, how do I thank her?|If somebody speaks only {s}, how do I thank "
        "them?|What would a {s} speaker say for thank you?|Which words do I use to thank someone in {s}?|How does "
        "one say thanks in {s}?|I want to thank my friend in {s}.|In the {s} language, thank you is what?|Thank "
        "you, but in {s}?|What do I say in {s} when someone helps me?|How are thanks given in {s}?|I got a present,"
        " how do I say thank you in {s}?|Language: {s}. Thank you:|*On a {s} card, how do I write thank you?"
    ),
    "emoji": (
        "Can you send the {s} emoji pls?|I'd like a little {s} emoji here.|Put a {s} emoji in the message.|Is there"
        " an emoji for {s}?|I need the emoji that shows a {s}.|Answer with the {s} emoji.|Give me the {s} as an "
        "emoji.|Which emoji do you use for {s}?|Reply with a {s}, the emoji.|How do I write {s} as an emoji?|Please"
        " write one {s} emoji.|My chat needs a {s} emoji.|Insert the {s} emoji.|A {s} emoji would be nice.|Emoji: "
        "{s}.|*Add the {s} emoji for my friend."
    ),
    "currency": (
        "I'm travelling to {s}, which currency do I need?|If I shop in {s}, what currency do I pay in?|What money "
        "should I take to {s}?|In {s}, what are the prices in, which currency?|Which coins and notes do they have "
        "in {s}?|My hotel is in {s}, which money do I pay with?|The bank of {s} prints what money?|In which "
        "currency do shops in {s} show prices?|What do I pay with when I am in {s}?|Before flying to {s}, which "
        "currency do I change money into?|People in {s} are paid in which currency?|Which money is in use in "
        "{s}?|The country {s} has which currency?|What is the name of the money in {s}?|Country: {s}. Currency:|*My"
        " aunt in {s} sends me money, in which currency?"
    ),
}
