"""MkDocs hook: CommonMark as code hosts read it, pages of files outside docs/, and nothing loaded from other servers.

Links of the documents are those of the repository, `../docker/README.md` or `../configs`, so that they lead somewhere
on a code host too. A target outside docs/ becomes a page below repository/: a document as it is, a text in a code
block, a folder as all of its texts that git has. What does not exist stays a link that MkDocs cannot resolve, which
fails the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
MERMAID = next((ROOT / ".venv-tools").glob("mermaid-*.js"), None)
"""Draws the diagrams in the browser, if `make site` could fetch it. Material would load it from a public server."""
_OUTSIDE = "repository/"
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: +)(?!\w+:)([^)#\s]+)", re.MULTILINE)
_ITEM = re.compile(r"(?:[-*+]|\d+\.) +")
_FENCE = re.compile(r"`{3,}|~{3,}")
_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//|<link[^>]+href=\"?(?:https?:)?//"
)
_log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> None:
    """Draw diagrams if mermaid is there; else they stay text."""
    if MERMAID:
        config.extra_javascript.append(MERMAID.name)
        fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
        fences["custom_fences"] = [{"name": "mermaid", "class": "mermaid"}]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs/ that the pages link to, and those that these link to."""
    if MERMAID:
        files.append(
            File(MERMAID.name, str(MERMAID.parent), config.site_dir, use_directory_urls=False)
        )
    waiting = [
        (f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()
    ]
    while waiting:
        for target in _targets(*waiting.pop()):
            uri = _uri(target)
            if not target.startswith("docs/") and not files.get_file_from_path(uri):
                text = _page(ROOT / target)
                level = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, uri, content=text, inclusion=level))
                waiting.append((target, text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Lead links to the pages of their targets, and indent lists as Python-Markdown needs it."""
    uri = page.file.src_uri
    source = uri.removeprefix(_OUTSIDE) if uri.startswith(_OUTSIDE) else f"docs/{uri}"

    def led(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if not (ROOT / target).exists():
            return link[0]
        return link[1] + posixpath.relpath(_uri(target), posixpath.dirname(uri) or ".")

    return "\n".join(_indented(_LINK.sub(led, markdown)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:  # noqa: ARG001
    """Warn of a page whose text or blocks differ from those of CommonMark."""
    wanted = MarkdownIt("commonmark").enable("table").render(page.file.content_string)
    for theirs, ours in zip(_parts(wanted), _parts(html), strict=True):
        if theirs != ours:
            same = len(posixpath.commonprefix([theirs, ours]))
            near = (theirs[same:][:60], ours[same:][:60])
            _log.warning("%s: CommonMark has %r, the page %r", page.file.src_uri, *near)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:  # noqa: ARG001
    """Warn of a page that loads something from another server."""
    for found in _LOADED.findall(output):
        _log.warning("%s loads from another server: %s", page.file.src_uri, found)


def _parts(page: str) -> tuple[str, str]:
    """The text without spaces, and the marks of lists, tables and blocks."""
    body = re.sub(r'<a class="headerlink".*?</a>', "", page)
    marks = re.findall(r"<(?:[uo]l|li|pre|td|th|h\d)\b", body)
    return "".join(unescape(re.sub(r"<[^>]+>", "", body)).split()), "".join(marks)


def _targets(source: str, markdown: str) -> Iterator[str]:
    """Existing files of the repository that a document links to."""
    for link in _LINK.finditer(markdown):
        if (ROOT / (target := _target(source, link[2]))).exists():
            yield target


def _target(source: str, link: str) -> str:
    """Path in the repository; of a folder that has a README, the README's."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    readme = f"{target}/README.md"
    return readme if (ROOT / readme).exists() else target


def _uri(target: str) -> str:
    """Place of a file of the repository among the sources of the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return _OUTSIDE + (target if target.endswith(".md") else f"{target}.md")


def _page(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if not path.is_dir():
        return f"# {name}\n\n{_code(path)}"
    chapters = (f"## {one.name}\n\n{_code(one)}" for one in sorted(_files(path)))
    return f"# {name}\n\n" + "\n".join(chapters)


def _files(folder: Path) -> Iterator[Path]:
    """The files of a folder: in a checkout, not those that only lie about."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(folder), "ls-files", "-z"]
        listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
        candidates = [folder / name for name in listed.split("\0") if name]
    else:
        candidates = [*folder.iterdir()]
    return (path for path in candidates if path.parent == folder and path.is_file())


def _code(path: Path) -> str:
    return f"~~~~ {path.suffix[1:]}\n{path.read_text(encoding='utf-8')}\n~~~~\n"


def _indented(markdown: str) -> Iterator[str]:
    """The lines as Python-Markdown reads them like CommonMark.

    Four spaces for each list around a line, where CommonMark has the width of an item's mark; a blank line above a
    list, and above each item of one with several paragraphs.
    """
    depths: list[int] = []  # columns at which the texts of the open items begin
    fence, above, loose = "", "", False
    for line in markdown.splitlines():
        text = line.lstrip(" ")
        column = len(line) - len(text)
        open_items = len(depths)
        while text and not fence and depths and column < depths[-1]:
            depths.pop()
        inner = max(column - (depths[-1] if depths else 0), 0)
        item = None
        if not fence:
            text = _escaped(text, above if open_items == len(depths) else "")
            item = _ITEM.match(text) if inner < 4 else None
            loose = bool(open_items and (loose or not text))
        if item and above and (loose or not open_items):
            yield ""
        yield " " * (4 * len(depths) + inner) + text if text else ""
        above = text
        if item:
            depths.append(column + item.end())
        if found := _FENCE.match(text):
            fence = "" if fence and text.startswith(fence) else fence or found[0]


def _escaped(text: str, above: str) -> str:
    """A line whose number begins no list, and whose code in a table has its bars without marks."""
    if above and not text.startswith("1. "):
        text = re.sub(r"^(\d+)\. ", r"\1\\. ", text)
    if text.startswith("|"):
        text = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), text)
    return text
