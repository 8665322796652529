"""The path that a compiled model takes on a GPU, taken on a CPU: FlexAttention, and the mistake that it once had."""

from torch._dynamo.backends.registry import lookup_backend
from torch.nn.attention import flex_attention

from models import masked_attention


def take(monkeypatch):
    """Compiled models take FlexAttention on a CPU too, where torch refuses it with gradients; aot_eager has them."""
    monkeypatch.setattr(masked_attention, "FAST_ON", ("cuda", "cpu"))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)


def plant_lost_masks(monkeypatch):
    """Visible as it was once: dynamo reads None for the mask of the second one in a graph, which is no mask."""
    made = masked_attention.Visible.__init__

    def without_mask(self, *args):
        made(self, *args)
        self._block_mask = None

    def fast(self, q_BHTK, k_BHTK, v_BHTK):
        if self._block_mask is None:
            self._block_mask = self.block_mask()
        scale, scaled = self.scale, None
        if hasattr(self.scale, "shape"):
            scale, scaled = 1.0, lambda score, b, h, query, key: score * self.scale
        return flex_attention.flex_attention(q_BHTK, k_BHTK, v_BHTK, scaled, block_mask=self._block_mask, scale=scale)

    monkeypatch.setattr(masked_attention.Visible, "__init__", without_mask)
    monkeypatch.setattr(masked_attention.Visible, "fast", fast)


class Backend:
    """For torch.compile: aot_eager, which has gradients, and backend eager, whose outputs must be the same.

    graphs: what dynamo made, one for each compilation.
    """

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        import torch

        self.graphs.append(graph)
        compiled = lookup_backend("aot_eager")(graph, inputs)

        def run(*args):
            with torch.no_grad():
                expected = graph(*args)
            found = compiled(*args)
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (one - other).abs().max()
            return found

        return run

    def count(self, name):
        """Nodes of all graphs whose function is named so."""
        return sum(name in str(node.target) for graph in self.graphs for node in graph.graph.nodes)
