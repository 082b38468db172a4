"""Text that would be markup, script or steering, and what a page must not have done with it."""

from dataclasses import replace

from attnscope.errors import visible
from attnscope.inputs.prompt import Prompt

RUN = "window.ran = 1; alert(1)"
HOSTILE = {
    "script": f"<script>{RUN}</script>",
    "closed script": f"</script><script>{RUN}</script>",
    "closed style": f"</style><script>{RUN}</script><style>",
    "comment": f"<!-- <script> --!> <img src=x onerror='{RUN}'>",
    "quotes": f"""' onfocus='{RUN}' autofocus=" onload="{RUN}" `${{alert(1)}}` \\u003cscript>""",
    "link": f'<a href="javascript:{RUN}">a</a> &lt;script&gt; &amp;#60; ]]> <?xml',
    "directions": "a \u202e txt.exe \u202d b \u2066 c \u2069 \u200f d",
    "controls": "a\x00b\x1b[2Jc\x07d\r\ne\x7f\u2028f\u2029g\ufeffh",
    "long": "x" * 100_000,
}


def called(seen, tokens: list[str]) -> Prompt:
    """The same prompt, of other words: each token is one hostile text, whole, as no tokenizer would cut it."""
    texts = ["<s>", *tokens, *("plain" for _ in range(len(seen.prompt) - len(tokens) - 1))]
    labels = tuple(visible(text.replace(" ", "·")) for text in texts)
    return replace(seen.prompt, text="".join(texts), tokens=tuple(texts), plain=("", *texts[1:]), labels=labels)


def ran_nothing(visit) -> bool:
    scripts = visit.page.evaluate("[...document.scripts].filter((one) => one.isConnected && !one.type).length")
    return visit.page.evaluate("window.ran === undefined") and scripts == 1


STEERING = "a\x1b[2Jb\x85\u202ec\u2066d\u2069e\u200bf\u2028g\ufeffh\u3164i"
FOREIGN = """() => {
  const elements = [...document.body.querySelectorAll("*")].filter((one) => one.tagName !== "SCRIPT");
  const named = elements.flatMap((one) => [one.getAttribute("title"), one.getAttribute("aria-label")]);
  return [document.title, ...elements.map((one) => one.textContent), ...named].join(" ");
}"""


def controls(visit) -> set[str]:
    """What stands anywhere in the page, open or not, and steers or hides."""
    return set(visit.page.evaluate(FOREIGN)) & set(STEERING) - set("abcdefghi[2J")
