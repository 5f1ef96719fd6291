"""What all pages share: templates, the look of figures, inlined scripts and images, writing the file."""

from __future__ import annotations

import base64
import html
import importlib
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rholoss.errors import RholossError
from rholoss.il.files import replacing

# Okabe and Ito's palette, which people with any common kind of colour blindness can tell apart.
GREY, ORANGE, BLUE = "#7A7A7A", "#D55E00", "#0072B2"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def need(module: str) -> ModuleType:
    """Import a module that only pages need; raise with how to install it if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RholossError(
            f"The page needs `{module.split('.')[0]}`, which is not installed: run "
            "pip install 'rholoss[report]', or pass --no-page to write no page."
        ) from None


def check_extra() -> None:
    """Raise if a package that a page needs is missing: before the work, rather than after it."""
    for module in ("jinja2", "plotly", "PIL.Image"):
        need(module)


def render(template: str, **context: Any) -> str:
    """Fill a template of this folder; plotly's script is included once.

    Args:
        template: the name of its file.
        context: the values that it shows, by name.
    """
    jinja2 = need("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rholoss", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    safe = need("markupsafe").Markup
    environment.filters["json"] = lambda value: safe(for_script(value))
    environment.filters["prose"] = lambda text: safe(prose(text))
    plotly = safe(need("plotly.offline").get_plotlyjs())
    return str(environment.get_template(template).render(plotly=plotly, font=FONT, **context))


def prose(text: str) -> str:
    """Escaped text without line breaks between a number and its unit, or inside the method's name."""
    joined = re.sub(r"(\d) (%|s\b)", r"\1&nbsp;\2", html.escape(text))
    return joined.replace("RHO-LOSS", '<span class="whole">RHO-LOSS</span>')


def write(path: str | os.PathLike[str], text: str) -> Path:
    """Write the page under a temporary name, then rename it; returns the path."""
    target = Path(path)
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return target


def for_script(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can close the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def figure(traces: Sequence[Mapping[str, Any]], x: str, y: str, **layout: Any) -> dict[str, Any]:
    """A figure for plotly, without the colours of text and axes, which the page sets.

    Args:
        traces: what is drawn, from `line`, `band` and the like.
        x, y: the labels of the axes.
        layout: further entries of plotly's layout; `xaxis` and `yaxis` are merged with the defaults.
    """
    axis = {"automargin": True, "zeroline": False, "ticks": "outside", "fixedrange": True}
    xaxis = {**axis, "title": {"text": x, "standoff": 8}, **layout.pop("xaxis", {})}
    yaxis = {**axis, "title": {"text": y, "standoff": 8}, **layout.pop("yaxis", {})}
    base = {
        "font": {"family": FONT, "size": 14},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "title": {"text": ""},
        },
        "hovermode": "x unified",
    }
    return {"data": list(traces), "layout": {**base, "xaxis": xaxis, "yaxis": yaxis, **layout}}


def line(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, dash: str, **more: Any
) -> dict[str, Any]:
    """A line, which differs from others in both colour and dash; `more` goes to plotly's trace."""
    style = {"color": colour, "dash": dash, "width": 2.5}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": rounded(x),
        "y": rounded(y),
        "line": style,
        **more,
    }


def band(
    name: str, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str
) -> dict[str, Any]:
    """The area between two lines, as one closed outline."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": rounded([*x, *reversed(x)]),
        "y": rounded([*high, *reversed(low)]),
        "fill": "toself",
        "fillcolor": f"{colour}30",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": name,
        "name": name,
    }


def rule(y: float) -> dict[str, Any]:
    """A thin horizontal line across the figure, at `y`."""
    ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    return {"type": "line", "layer": "below", "line": {"width": 1.2, "color": GREY}, **ends}


def rounded(values: Sequence[float]) -> list[float]:
    """The values with four decimals, which is enough for a picture and keeps the page small."""
    return [round(float(value), 4) for value in values]


def sprite(images: np.ndarray) -> str:
    """Grey images [N, h, w] side by side in one row, as a PNG in a data URL."""
    picture = need("PIL.Image").fromarray(255 - np.concatenate(list(images), axis=1))
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
