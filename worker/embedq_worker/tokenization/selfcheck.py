"""The check at load: does the fast path agree with the reference on what usually tells tokenizers apart?"""

# ruff: noqa: RUF001 - the look-alike characters below are what is being tried

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from embedq_worker.tokenization.columns import text_column
from embedq_worker.tokenization.fast import FastTokenizer
from embedq_worker.tokenization.reference import ReferenceTokenizer
from embedq_worker.tokenization.routing import Router
from embedq_worker.tokenization.stable_codepoints import stable_codepoints

_SCRIPTS = (
    "The quick brown fox", "Příliš žluťoučký kůň", "Съешь ещё этих мягких булок", "Ξεσκεπάζω την ψυχοφθόρα",
    "Խաղաղություն ամենքին", "דג סקרן שט בים", "نص حكيم له سر قاطع", "ܐܒܓܕ", "ހަޔާތް", "ऋषियों को सताने वाले",
    "আমার সোনার বাংলা", "ਸਤਿ ਸ੍ਰੀ ਅਕਾਲ", "આવજો મિત્રો", "ଶୁଭ ସକାଳ", "யாமறிந்த மொழிகளிலே", "తెలుగు భాష", "ಕನ್ನಡ ನಾಡು",
    "മലയാളം ഭാഷ", "ආයුබෝවන්", "เป็นมนุษย์สุดประเสริฐ", "ສະບາຍດີ", "བཀྲ་ཤིས་བདེ་ལེགས།", "မြန်မာဘာသာ", "გამარჯობა მსოფლიო",
    "ሰላም ልዑል", "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ", "ᐃᓄᒃᑎᑐᑦ", "ᚠᚢᚦᚨᚱᚲ", "ភាសាខ្មែរ", "ᠮᠣᠩᠭᠣᠯ", "いろはにほへと チリヌルヲ", "ｶﾀｶﾅ",
    "天地玄黃宇宙洪荒", "ㄅㄆㄇㄈ", "다람쥐 헌 쳇바퀴에", "ꀀꀁꀂ", "ⵜⴰⵎⴰⵣⵉⵖⵜ", "ߒߞߏ", "𐍅𐌿𐌻𐍆𐌹𐌻𐌰", "𐤀𐤁𐤂", "𒀀𒀁𒀂", "𓀀𓀁𓀂",
)  # fmt: skip

_SHAPES = (
    "", " ", "  ", "   a", "a   ", "a   b", "\t", "\t\ta", "\n", "\n\n\n", " \n \n a", "a\r\nb\r\n\r\nc", "\r\r",
    "\n ", " \n", "\u00a0\u00a0x", "\u3000全角", "\u2028\u2029\u0085x", "\u200b\u200c\u200d\ufeff",
    "\x00\x01\x1f\x7f\x80\x9f", "\v\f", "a\x00b", "I'm you'RE we'Ve he'LL she'd it'S can'T 'M'", "'ſ it'ſ", "’s ’t",
    "don''t", "'", "''s", "0", "12", "123456789012345678901234567890", "3.14159e-10", "1,000,000", "x1y22z333",
    "٣٤٥ ४५६ ½ Ⅷ ²", "𝟘𝟙𝟚𝒜𝓑", "!!!", "...\n\n", "?!?\r\n", " !", "a!b", "#include <stdio.h>\nint main() { return 0; }",
    "<html></html>", "<|", "|>", "https://example.org/a?b=c&d=%20#e", "C:\\dir\\file", "a_b-c.d@e", "{}[]()",
    "«»“”‘’—…", "😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "1️⃣", "❤️", "☃", "\ufe0f", "\U000e0067\U000e007f", "e\u0301",
    "\u0301", "a\u0323\u0307", "a\u0307\u0323", "\u1e0b\u0323", "\u0344\u0958\u2126\u212a\u212b", "\u1100\u1161\u11a8",
    "\uac00\u11a8", "q\u0307\u0323\u0345\u0334", "<\u0338", "\u037e\u1fef\u2000", "\uf900\ufa10\U0002f800",
    "e" + "\u0301" * 40, "\ue000\uf8ff", "\U000f0000\U0010fffd", "\ufffd\ufffe\uffff", "\U0001f600" * 30, "a" * 300,
    "é" * 300, " " * 300, "\n" * 300, "aaaa " * 200, "ab" * 1000, "0" * 1000, "-" * 1000, "字" * 500, "ё" * 500,
)  # fmt: skip

#: Blocks of tens of thousands of characters of one kind; one in 61 of them is tried.
_UNIFORM = ((0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0x20000, 0x3FFFF), (0xF0000, 0x10FFFF))


def probe_texts() -> list[str]:
    """Texts of every script and shape, also decomposed, and every stable character between letters and digits."""
    plain = [*_SCRIPTS, *_SHAPES]
    forms = [unicodedata.normalize(form, text) for form in ("NFD", "NFC") for text in plain]
    return list(dict.fromkeys([*plain, *forms, " ".join(plain), "\n".join(reversed(plain)), *_character_sweep()]))


def find_disagreement(fast: FastTokenizer, reference: ReferenceTokenizer, router: Router) -> str | None:
    """The first probe text on which the two differ, as it would be written in Python; None where they agree.

    Texts that the router gives to the reference anyway are left out.
    """
    texts = pa.array([*probe_texts(), *_around_added_tokens(reference)], pa.string())
    texts = texts.filter(pa.array(~router.unsafe(text_column(texts))))
    got = fast.encode(text_column(texts))
    expected = reference.encode(texts.to_pylist())
    if expected.errors:
        return ascii(texts[min(expected.errors)].as_py())
    want = expected.tokens
    if np.array_equal(got.offsets, want.offsets) and np.array_equal(got.ids, want.ids):
        return None
    for row in range(len(texts)):
        mine = got.ids[got.offsets[row] : got.offsets[row + 1]]
        if not np.array_equal(mine, want.ids[want.offsets[row] : want.offsets[row + 1]]):
            return ascii(texts[row].as_py()[:80])
    return "all of them: the fast path returns another number of rows"


def _around_added_tokens(reference: ReferenceTokenizer) -> Iterator[str]:
    # Near misses: names that lack a byte, in other case, or broken by a space must be ordinary text for both.
    for token in reference.added_tokens:
        name = token.content
        yield f"a{name[:-1]} b{name[1:]} {name.upper()} {name[:2]} {name[2:]}"


def _character_sweep() -> Iterator[str]:
    codes = np.flatnonzero(stable_codepoints())
    for first, last in _UNIFORM:
        codes = codes[(codes < first) | (codes > last) | (codes % 61 == 0)]
    for start in range(0, len(codes), 64):
        yield "".join(f"a{c}b {c}1'{c}" for c in map(chr, codes[start : start + 64]))
