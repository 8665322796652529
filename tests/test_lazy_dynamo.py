"""What stands in for torch's compiler: training is the same, and code that compiles gets the real one."""

import json
import subprocess
import sys

import pytest

from bench.base.paths import REPO

TRAIN = """
import inspect, json, sys, torch
from bench.machine import lazy_dynamo
{before}
found = {{}}
def imported():
    return "torch._dynamo.convert_frame" in sys.modules
torch.manual_seed(0)
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
net = torch.nn.Linear(3, 3)
ddp = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
for make in (torch.optim.AdamW, torch.optim.SGD):
    optimizer = make(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
torch.distributed.destroy_process_group()
inspect.getmodule(lambda: None)
found["weights"] = net.weight.tolist()
found["after training"] = imported(), lazy_dynamo.is_imported()
calls = []
lazy_dynamo.when_imported(lambda: calls.append(imported()))
found["called early"] = list(calls)
compiled = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
found["compiled"] = compiled(torch.ones(2)).tolist()
from torch._dynamo.utils import counters
found["graphs"] = counters["stats"]["unique_graphs"]
found["at the end"] = imported(), lazy_dynamo.is_imported(), calls, "StandIn" in type(torch._dynamo).__name__
optimizer.step()
print(json.dumps(found))
"""


def train(before):
    code = TRAIN.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_optimizer_does_not_import_the_compiler_and_trains_the_same_and_compiling_does():
    plain, lazy = train(""), train("lazy_dynamo.install()")
    assert plain["after training"] == [True, True] and plain["called early"] == [True]
    assert lazy["after training"] == [False, False] and lazy["called early"] == []
    assert lazy["weights"] == plain["weights"]
    for facts in (plain, lazy):
        assert (facts["compiled"], facts["graphs"]) == ([2.0, 2.0], 1)
        assert facts["at the end"] == [True, True, [True], False]
