"""A text coloured by the gates of its tokens, as one HTML page that needs nothing else.

Nothing of the text is ever executed: it is escaped, apart from the data that the script reads, and the page allows no
script but its own, named by its hash.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path

from lm.passage import Piece
from pretrain.inspection import Mix
from pretrain.mix_figures import colour, symbol

ASSETS = Path(__file__).parent / "assets"
THOUSANDTHS = 1000


def text_page(title: str, pieces: Sequence[Piece], mixes: Sequence[Mix]) -> str:
    """Return the page.

    Args:
        title: its heading.
        pieces: the text.
        mixes: what it can be coloured by; a row for each token.
    """
    script = (ASSETS / "text_page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "title": html.escape(title),
        "tokens": "".join(f"<span>{html.escape(piece.text)}</span>" for piece in pieces),
        # Names of layers and activations only; as JSON, an end of the script element would still be one.
        "data": json.dumps([_layer(mix, pieces) for mix in mixes], separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    head, *rest = (ASSETS / "text_page.html").read_text(encoding="utf-8").split("{{")
    # One pass over the template: what is filled in is not searched for names again.
    for part in rest:
        name, _, following = part.partition("}}")
        head += parts[name] + following
    return head


def _layer(mix: Mix, pieces: Sequence[Piece]) -> dict[str, object]:
    """The weights of every piece, the mean over its tokens."""
    weights = [mix.weights[piece.start : piece.stop].mean(0) for piece in pieces]
    columns = zip(*((THOUSANDTHS * row).round().int().tolist() for row in weights), strict=True)
    return {
        "name": f"{mix.layer}, {symbol(mix.gate)}",
        "labels": list(mix.labels),
        "colours": [colour(label) for label in mix.labels],
        "means": [round(value, 4) for value in mix.mean.tolist()],
        "most_varied": mix.most_varied(),
        "weights": [list(column) for column in columns],
    }
