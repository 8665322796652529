"""Takes a compiled model's GPU path, FlexAttention, on a CPU, and reintroduces a mistake that it once had."""

from torch._dynamo.backends.registry import lookup_backend
from torch.nn.attention import flex_attention

from models import masked_attention


def take(monkeypatch):
    """Lets compiled models use FlexAttention on a CPU, where torch refuses gradients, which aot_eager supports."""
    monkeypatch.setattr(masked_attention, "FAST_ON", ("cuda", "cpu"))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)


def plant_lost_masks(monkeypatch):
    """Restores an old bug of Visible: dynamo reads None, which means no mask, for the second mask in a graph."""
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
    """A backend of torch.compile that runs aot_eager, which has gradients, and checks it against eager outputs.

    graphs: the graphs that dynamo made, one per compilation.
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
            outputs = compiled(*args)
            for output, other in zip(outputs, expected, strict=True):
                assert torch.allclose(output, other, rtol=1e-4, atol=1e-5), (output - other).abs().max()
            return outputs

        return run

    def count(self, name):
        """Returns the number of nodes in all graphs whose target contains the name."""
        return sum(name in str(node.target) for graph in self.graphs for node in graph.graph.nodes)
