"""HTML of text, tables and interactive figures, on one page that opens without a network."""

from __future__ import annotations

import contextlib
import html
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rankzero.scalars import rounded

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:auto;padding:1rem;background:Canvas;
 color:CanvasText;overflow-wrap:anywhere} th,td:first-child{overflow-wrap:break-word}
h1{font-size:1.5rem} h2{font-size:1.2rem;margin-top:2rem} h3{font-size:1rem;margin-top:1.5rem}
table{display:block;overflow-x:auto;margin:1rem 0;border-collapse:collapse;
 font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.25rem 1rem .25rem 0;white-space:pre-wrap;
 border-bottom:1px solid rgb(128 128 128/.3)} td+td{min-width:6rem}
tr:has(:nth-child(8)) td{min-width:0;overflow-wrap:break-word}
code,pre{font:.9em ui-monospace,monospace} summary{cursor:pointer;margin:1rem 0}
pre{overflow-x:auto;padding:.75rem;background:rgb(128 128 128/.12);border-radius:.4rem}
.grid{display:grid;grid-auto-flow:dense;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,28rem),1fr))}
.grid>*,figure{min-width:0;margin:0} .grid h3{margin:.5rem 0}
.wide{grid-column:1/-1;overflow-x:auto} .wide>div{min-width:40rem}
img{max-width:100%;height:auto;border-radius:.4rem}
.js-plotly-plot text:not(.hoverlayer *,.heatmap-label *){fill:CanvasText!important}
/* Without a mouse, the toolbar would cover the legend all the time. */
@media (hover:none){.modebar{display:none!important}}
"""
_GREY = "rgba(128,128,128,.3)"
WIDE = "wide"
"""The `meta` of a plotly layout: a phone scrolls the chart, and does not squeeze it."""


def page(title: str, parts: Iterable[Any]) -> str:
    """Return an HTML page of parts: HTML as text, and plotly figures with plotly itself inside."""
    name = html.escape(title, quote=False)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style></head><body><h1>{name}</h1>"
        "<noscript>The charts need JavaScript: open this file in a browser.</noscript>"
        # Charts were drawn before the page had its columns.
        f"{''.join(_parts(parts))}<script>dispatchEvent(new Event('resize'))</script></body></html>"
    )


def _parts(parts: Iterable[Any]) -> Iterable[str]:
    # Plotly's script comes with the first figure only: it is 4 MB.
    script = True
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        import plotly.io

        # No colours of its own behind it, so that the page may be light or dark.
        clear, lines = "rgba(0,0,0,0)", {"gridcolor": _GREY, "zerolinecolor": _GREY}
        # In the page's own text, long titles and legends of several lines do not collide.
        title, wide = html.escape(part.layout.title.text or ""), part.layout.meta == WIDE
        part.update_layout(
            template="plotly_white",
            title=None,
            height=part.layout.height or 400,
            paper_bgcolor=clear,
            plot_bgcolor=clear,
            font_family="system-ui, sans-serif",
            # Next to a chart, it would leave no room on a phone.
            legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
            margin={"l": 60, "r": 20, "t": 40, "b": 50},
        )
        part.update_xaxes(lines).update_yaxes(lines, hoverformat=".4~g")
        for trace in part.data:
            for name in ("text", "hovertemplate"):
                if isinstance(texts := getattr(trace, name, None), tuple):
                    trace[name] = [rounded(one) if isinstance(one, str) else one for one in texts]
        options = {"responsive": True, "displaylogo": False}
        chart = plotly.io.to_html(part, options, full_html=False, include_plotlyjs=script)
        script = False
        yield f'<figure class="{WIDE if wide else ""}"><h3>{title}</h3>{chart}</figure>'


def figures(text: str) -> Iterator[Any]:
    """Yield the figures of a page that `page` made. Only their data is read, and no script."""
    import plotly.graph_objects as go

    _, *charts = text.split("<figure ")
    for chart in charts:
        title = html.unescape(chart.partition("<h3>")[2].partition("</h3>")[0])
        # Plotly's own script may come first, and it has the name of the call, too.
        call = chart.rpartition("Plotly.newPlot(")[2].partition("[")
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # a damaged file
            data, end = json.JSONDecoder().raw_decode(f"[{call[2]}")
            layout, _ = json.JSONDecoder().raw_decode(call[2][end - 1 :].lstrip(" ,\n"))
            yield go.Figure(data, {**layout, "title": title})


def from_markdown(text: str) -> str:
    """Return Markdown as HTML. HTML and pictures in it stay text: anyone may have written it."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return str(parser.render(text))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts. A row of one text is a heading."""

    def line(cells: Sequence[str], kind: str) -> str:
        wide = f' colspan="{len(head)}"' if len(cells) < len(head) else ""
        texts = (f"<{kind}{wide}>{html.escape(cell)}</{kind}>" for cell in cells)
        return f"<tr>{''.join(texts)}</tr>"

    body = "".join(line(row, "td" if len(row) == len(head) else "th") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"
