"""What a written page shows, read without a browser."""

from html.parser import HTMLParser


class Parsed(HTMLParser):
    """The tables of a page by their ids, its headings, and the attributes of all its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._table: list[list[str]] = []
        self._into: list[str] | None = None
        self._script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a row, cell or heading."""
        self.tags.append((tag, dict(attrs)))
        if tag == "div" and "table" in (dict(attrs).get("class") or "").split():
            self._table = self.tables.setdefault(dict(attrs).get("id") or "", [])
        elif tag == "tr":
            self._table.append([])
        elif tag in {"td", "th"}:
            self._into = self._table[-1]
            self._into.append("")
        elif tag in {"h1", "h2"}:
            self._into = self.headings
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:
        """Close it."""
        if tag in {"td", "th", "h1", "h2"}:
            self._into = None

    def handle_data(self, data: str) -> None:
        """Add the text of what is open."""
        if self._into is not None:
            self._into[-1] += data

    def series_of(self, *tags: str) -> set[str | None]:
        """Return the numbers of the series that tags of these names have."""
        return {a["data-series"] for tag, a in self.tags if tag in tags and "data-series" in a}
