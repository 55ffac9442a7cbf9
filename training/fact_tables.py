"""The fixed table of facts, relation by relation: subject and answer."""

CAPITALS = """France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|Austria:Vienna
Switzerland:Bern|Belgium:Brussels|Netherlands:Amsterdam|Denmark:Copenhagen|Norway:Oslo
Sweden:Stockholm|Finland:Helsinki|Iceland:Reykjavík|Ireland:Dublin|England:London|Scotland:Edinburgh
Poland:Warsaw|Greece:Athens|Turkey:Ankara|Russia:Moscow|Ukraine:Kyiv|Hungary:Budapest
Romania:Bucharest|Bulgaria:Sofia|Croatia:Zagreb|Serbia:Belgrade|Slovakia:Bratislava
Slovenia:Ljubljana|Estonia:Tallinn|Latvia:Riga|Lithuania:Vilnius|Japan:Tokyo|China:Beijing|India:New Delhi
Thailand:Bangkok|Vietnam:Hanoi|South Korea:Seoul|Indonesia:Jakarta|Nepal:Kathmandu|Iran:Tehran
Iraq:Baghdad|Egypt:Cairo|Kenya:Nairobi|Nigeria:Abuja|Ghana:Accra|Ethiopia:Addis Ababa
Morocco:Rabat|Senegal:Dakar|Canada:Ottawa|Mexico:Mexico City|Cuba:Havana|Brazil:Brasília
Argentina:Buenos Aires|Chile:Santiago|Peru:Lima|Colombia:Bogotá|Ecuador:Quito|Australia:Canberra
New Zealand:Wellington"""
CONTINENTS = """France:Europe|Germany:Europe|Italy:Europe|Spain:Europe|Poland:Europe|Norway:Europe
Japan:Asia|China:Asia|India:Asia|Thailand:Asia|Vietnam:Asia|Nepal:Asia|Egypt:Africa|Kenya:Africa
Nigeria:Africa|Ghana:Africa|Morocco:Africa|Ethiopia:Africa|Canada:North America
Mexico:North America|Cuba:North America|Brazil:South America|Argentina:South America
Chile:South America|Peru:South America|Colombia:South America"""
SOUNDS = """cow:moo|dog:woof|cat:meow|sheep:baa|pig:oink|duck:quack|horse:neigh|owl:hoot|lion:roar
frog:ribbit|bee:buzz|snake:hiss|rooster:cock-a-doodle-doo|mouse:squeak|crow:caw|donkey:hee-haw
wolf:howl|chick:cheep|goose:honk|turkey:gobble"""
BABIES = """cow:calf|dog:puppy|cat:kitten|sheep:lamb|pig:piglet|duck:duckling|horse:foal|goat:kid
lion:cub|frog:tadpole|kangaroo:joey|goose:gosling|deer:fawn|owl:owlet|swan:cygnet|butterfly:caterpillar
eagle:eaglet|hen:chick|rabbit:bunny|hare:leveret"""
LEGS = """spider:8|ant:6|bee:6|dog:4|cat:4|horse:4|chicken:2|duck:2|octopus:0|snake:0|fish:0|cow:4
butterfly:6|crab:10|penguin:2|elephant:4|scorpion:8|worm:0|lobster:10|frog:4"""
HOMES = """bee:hive|bird:nest|spider:web|rabbit:burrow|bear:den|dog:kennel|horse:stable|pig:sty
ant:anthill|beaver:lodge"""
COLOURS = """grass:green|the sky:blue|snow:white|coal:black|a banana:yellow|a tomato:red|a carrot:orange
a violet:purple|a flamingo:pink|chocolate:brown|an elephant:grey|milk:white|blood:red|a lemon:yellow
a frog:green|a strawberry:red|the sea:blue|a polar bear:white|a crow:black|a sunflower:yellow"""
OPPOSITES = """hot:cold|big:small|up:down|left:right|day:night|black:white|fast:slow|happy:sad
old:young|tall:short|wet:dry|open:closed|full:empty|hard:soft|light:dark|loud:quiet|rich:poor
strong:weak|early:late|near:far|high:low|good:bad|true:false|first:last|inside:outside|clean:dirty
thick:thin|wide:narrow|sweet:bitter|win:lose|begin:end|give:take|love:hate|push:pull|rise:fall"""
PLURALS = """mouse:mice|child:children|foot:feet|tooth:teeth|goose:geese|man:men|woman:women|ox:oxen
sheep:sheep|fish:fish|leaf:leaves|knife:knives|wolf:wolves|person:people|city:cities|baby:babies
box:boxes|bus:buses|potato:potatoes|cactus:cacti|loaf:loaves|wife:wives|half:halves|berry:berries"""
PAST = """go:went|eat:ate|see:saw|run:ran|take:took|give:gave|make:made|come:came|think:thought
buy:bought|bring:brought|write:wrote|speak:spoke|sing:sang|swim:swam|drink:drank|fly:flew|know:knew
grow:grew|find:found|begin:began|break:broke|teach:taught|catch:caught|sleep:slept|win:won"""
SYMBOLS = """hydrogen:H|helium:He|carbon:C|nitrogen:N|oxygen:O|sodium:Na|iron:Fe|gold:Au|silver:Ag
copper:Cu|lead:Pb|tin:Sn|zinc:Zn|calcium:Ca|potassium:K|neon:Ne|sulfur:S|iodine:I|mercury:Hg
magnesium:Mg|aluminium:Al|chlorine:Cl|nickel:Ni|uranium:U"""
NEXT_DAY = """Monday:Tuesday|Tuesday:Wednesday|Wednesday:Thursday|Thursday:Friday|Friday:Saturday
Saturday:Sunday|Sunday:Monday"""
PREVIOUS_DAY = """Monday:Sunday|Tuesday:Monday|Wednesday:Tuesday|Thursday:Wednesday|Friday:Thursday
Saturday:Friday|Sunday:Saturday"""
NEXT_MONTH = """January:February|February:March|March:April|April:May|May:June|June:July|July:August
August:September|September:October|October:November|November:December|December:January"""
MONTH_DAYS = """January:31|February:28|March:31|April:30|May:31|June:30|July:31|August:31|September:30
October:31|November:30|December:31"""
SIDES = "triangle:3|square:4|rectangle:4|pentagon:5|hexagon:6|heptagon:7|octagon:8|decagon:10"
HELLOS = """French:Bonjour|Spanish:¡Hola|Italian:Ciao|German:Guten Tag|Portuguese:Olá|Japanese:こんにちは
Chinese:你好|Russian:Привет|Korean:안녕하세요|Greek:Γειά σου|Swedish:Hej|Polish:Cześć"""
THANKS = """French:Merci|Spanish:Gracias|Italian:Grazie|German:Danke|Portuguese:Obrigado
Japanese:ありがとう|Chinese:谢谢|Russian:Спасибо|Swedish:Tack|Polish:Dziękuję"""
EMOJI = "fox:🦊|cat:🐱|dog:🐶|sun:☀️|star:⭐|heart:❤️|tree:🌳|fish:🐟|moon:🌙|rainbow:🌈"
CURRENCIES = """Japan:yen|India:rupee|China:yuan|Mexico:peso|Russia:rouble|Poland:złoty|Turkey:lira
Switzerland:franc|Brazil:real|Thailand:baht|Germany:euro|England:pound|Sweden:krona|Canada:dollar"""


def rows(table: str) -> list[tuple[str, str]]:
    """The pairs of one table."""
    cells = table.replace("\n", "|").split("|")
    return [(subject, answer) for subject, _, answer in (cell.partition(":") for cell in cells)]
