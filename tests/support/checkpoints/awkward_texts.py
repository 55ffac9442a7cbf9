"""Texts that tokenizers cut differently if a rule is slightly wrong."""

WORDS = (
    "Hello, world!", "don't I'm we'll THEY'RE it'S 'tis I'D'VE", "rock 'n' roll, o'clock, 's",
    "CamelCaseWordsHTTPServer", "ALLCAPS lower Title mIxEd iPhone eBay", "snake_case kebab-case dot.case",
    "a b c d e", "well-known co-operate re-elect", "e.g. i.e. etc. U.S.A. Ph.D.", "fi ﬁ ﬀ ligatures",
    "naïve café résumé Zürich", "ÀÉÎÕÜ àéîõü ß ÿ Ǆ ǅ ǆ", "Ελληνικά ΚΕΦΑΛΑΊΑ", "Привет, мир! ЭТО Тест", "שלום עולם",
    "مرحبا بالعالم ١٢٣٤", "नमस्ते दुनिया १२३४", "สวัสดีชาวโลก กำลังทดสอบ", "Việt Nam đẹp lắm",
    "한국어 문장입니다. 안녕하세요", "日本語のテキスト、カタカナとひらがな。", "中文字符测试，标点符号！",
    "中文English混排abc一二三123", "ქართული ენა ᲛᲗᲐᲕᲠᲣᲚᲘ", "հայերեն լեզու ՀԱՅԵՐԵՆ", "አማርኛ", "தமிழ் மொழி",
    "বাংলা ভাষা", "ខ្មែរ ភាសា",
)  # fmt: skip
NUMBERS = (
    "1", "12", "123", "1234", "12345", "1234567890", " 1 22 333 4444 55555", "3.14159 1,000,000 1e-10 0xFF",
    "1st 2nd 3rd", "½ ¾ ² ³ ① ⅷ Ⅻ", "２０２４年", "v1.2.3-rc4", "2024-05-17T12:34:56Z", "000000000000000000000",
    "a1b2c3 4d5e6", "100% $5.00 €3,50 £7",
)  # fmt: skip
SPACES = (
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", " \n", "\n ", " \n \n ", "a\n", "\na",
    "a  b", "a   b    c", " leading", "trailing ", "  both  ", "tab\tseparated\t\tvalues", "\t\tindented",
    "line\r\nline\r\n\r\nline", "mixed \t \n \r\n x", "                    x", "x                                 ",
    "non\u00a0breaking\u00a0space", "ideographic\u3000space", "zero\u200bwidth\u200djoiner", "a\u2028b\u2029c",
    "\u0085next", "a \n\n  b", "...\n\n...", "end.\n  \n\tstart", "\v\f",
)  # fmt: skip
SYMBOLS = (
    "!!!", "?!?!", "...", "---", "===", "(a)(b)[c]{d}", "<tag attr=\"v\">x</tag>", "a+b=c*d/e^f",
    "~`@#$%^&*()_+-={}[]|\\:;\"'<>,.?/", "“quotes” ‘single’ «guillemets»", "— en – em …", "© ® ™ § ¶ †",
    "→ ← ↑ ↓ ⇒ ∀x∈ℝ", "$x^2 + y^2$", "\\frac{1}{2}", "#hashtag @mention", "http://example.com/path?x=1&y=2#z",
    "user@example.com", "/usr/bin/env", "C:\\Windows\\System32", "!\n", " !\n\n", "//\n", "a/b/c/\n",
)  # fmt: skip
EMOJI = (
    "😀", "😀😃😄", "👍🏽", "👨\u200d👩\u200d👧\u200d👦", "🇩🇪🇫🇷", "text😀text 😀 text", "❤️ ☺️ ✌🏿",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
)  # fmt: skip
MARKS = (
    "e\u0301", "cafe\u0301 re\u0301sume\u0301", "n\u0303 o\u0308 A\u030a",
    "z\u0335\u0321a\u0334\u0322l\u0337g\u0336o\u0338", "\u0301alone", "x \u0301y", "\u1100\u1161\u11a8",
    "\u0928\u094d\u092f\u093e", "\ufeffbom", "\u202eright to left\u202c",
)  # fmt: skip
CODE = (
    "def f(x):\n    return x ** 2  # square\n", "for (int i = 0; i < n; i++) {\n\tsum += a[i];\n}\n",
    "if x:\n        pass\n\n\n    else:\n", "SELECT * FROM t WHERE a = 'b' AND c >= 10;",
    "{\"key\": [1, 2.5, null], \"s\": \"\\n\"}", "#include <stdio.h>\n\nint main() { return 0; }",
    "const f = async () => await g?.(`${x}`);", "x = \"\"\"doc\n  string\"\"\"", "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "- item\n  - nested\n* star\n1. one\n",
)  # fmt: skip
SPECIAL = (
    "<|start|>", "a<|start|>b", "<|start|><|start|>", " <|start|> ", "<|start", "x<|start|>\n\ny",
    "<think>why</think>", " <think> ", "<s>a</s>", "[INST] hi [/INST]", "<0x0A>", "\u2581under\u2581", "\u0120\u010a",
)  # fmt: skip
TEXTS = (*WORDS, *NUMBERS, *SPACES, *SYMBOLS, *EMOJI, *MARKS, *CODE, *SPECIAL)
