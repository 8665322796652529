"""AdamW and Muon against torch's own, across ranks, and through a warm-up that is undone."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cases import slow
from rank_forks import ranks_of

import models
from bench.config import compose, identity, schema
from bench.training import distributed
from models import optimizers
from models.muon_update import Muon, newton_schulz, share_out

ROOT = Path(__file__).parent.parent
SHAPE = {"vocab_size": 64, "seq_len": 16, "num_layers": 2, "num_heads": 2, "width": 32}
COMMON = {"lr": 0.004, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "schedule": {"name": "constant"}}
MUON = {"muon_lr": 0.02, "muon_momentum": 0.95, "muon_weight_decay": 0.1, "muon_ns_steps": 5}
GROUPS = {
    "embedding": {"name": "adamw", "tensors": ["embedding", "head"], "lr": 0.004, "beta1": 0.8, "weight_decay": 0.1},
    "vectors": {"name": "adamw", "tensors": ["vectors"], "lr": 0.004, "beta1": 0.8},
    "matrices": {"name": "muon", "tensors": ["matrices"], "lr": 0.02, "weight_decay": 0.1},
}
SETTINGS = {
    "adamw": COMMON | {"name": "adamw"},
    "muon": COMMON | MUON | {"name": "muon"},
    "groups": {"name": "groups", "groups": GROUPS, "schedule": {"name": "constant"}},
}
SHAPES = [(64, 64), (96, 32), (32, 128), (64, 64), (17, 40), (1, 8), (8, 1)]


def made(arch="gpt2", optim="muon", rank=0, world_size=1, batched=None):
    model = models.load(arch)(**SHAPE)
    model.init_weights(torch.Generator().manual_seed(0))
    settings = copy.deepcopy(SETTINGS[optim])
    if batched is not None:
        (settings["groups"]["matrices"] if optim == "groups" else settings).update(
            {"batched" if optim == "groups" else "muon_batched": batched}
        )
    return model, schema.build(optimizers.Config, settings).build(model, rank, world_size, "cpu")


def train(model, optimizer, num_steps, first_seed=0):
    for seed in range(first_seed, first_seed + num_steps):
        tokens_BT = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(seed))
        model(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


pytestmark = pytest.mark.usefixtures("one_torch_thread")  # as in ranks of rank_forks.py: several add in another order


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def random_matrices(seed, shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def after_five_steps(build, shapes=SHAPES):
    """Weights and the last step's changes, with gradients of very different sizes and a falling learning rate."""
    matrices = [torch.nn.Parameter(matrix) for matrix in random_matrices(0, shapes)]
    optimizer = build(matrices)
    for step in range(5):
        before = [matrix.detach().clone() for matrix in matrices]
        for matrix, grad in zip(matrices, random_matrices(step + 1, shapes)):
            matrix.grad = grad * 10.0 ** (step - 3)
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 10)
        optimizer.step()
    after = [matrix.detach() for matrix in matrices]
    return after, [new - old for new, old in zip(after, before)]


def torch_muon(matrices):
    return torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.3, ns_steps=5, adjust_lr_fn="original")


def our_muon(matrices, **options):
    return Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.3, ns_steps=5, **options)


def test_muon_in_bfloat16_is_torchs_muon_bit_for_bit():
    ours, _ = after_five_steps(lambda matrices: our_muon(matrices, products=torch.bfloat16))
    theirs, _ = after_five_steps(torch_muon)
    assert same(ours, theirs)


def test_muon_on_a_cpu_is_torchs_muon_but_for_the_order_of_adding():
    _, our_changes = after_five_steps(our_muon)
    _, their_changes = after_five_steps(torch_muon)
    assert_close(our_changes, their_changes)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 128)])
def test_newton_schulz_keeps_directions_and_evens_out_sizes(shape):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(side, 8, generator=generator)).Q for side in shape)
    update = left @ torch.diag(torch.logspace(-1, 2, 8)) @ right.T  # singular values from 0.1 to 100
    even = left.T @ newton_schulz(update, 10).float() @ right
    off_diagonal = even - even.diagonal().diag()
    assert ((even.diagonal() > 0.6) & (even.diagonal() < 1.25)).all(), even.diagonal()
    assert off_diagonal.abs().max() < 0.1


def test_shares_are_balanced_by_cost():
    # n*n*(2m+n): 4x4 192, 2x8 72, 8x2 72, 2x2 24, 1x1 3; 192 to rank 0, 72 + 72 + 24 + 3 to rank 1
    matrices = [torch.empty(shape) for shape in [(2, 2), (2, 8), (4, 4), (8, 2), (1, 1)]]
    assert share_out(matrices, 2) == [[2], [1, 3, 0, 4]]
    assert share_out(matrices, 1) == [[2, 1, 3, 0, 4]]
    assert sorted(index for share in share_out(matrices, 3) for index in share) == [0, 1, 2, 3, 4]
    assert share_out(matrices[:1], 3) == [[0], [], []]


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_parameter_belongs_to_exactly_one_group(arch, name):
    model, optimizer = made(arch, name)
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))
    assert all(group["lr"] == group["peak_lr"] for group in optimizer.param_groups)


def test_weight_decay_is_for_matrices_and_muon_takes_the_hidden_ones():
    model, optimizer = made("gpt2", "adamw")
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(decays[id(p)] == (0.1 if p.ndim == 2 else 0.0) for p in model.parameters())
    model, optimizer = made("gpt2", "muon")
    assert list(map(id, optimizer.parts["muon"].param_groups[0]["params"])) == list(map(id, model.hidden_matrices()))
    assert [group["peak_lr"] for group in optimizer.param_groups] == [0.004, 0.004, 0.02]
    assert [group["weight_decay"] for group in optimizer.parts["adamw"].param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(("arch", "batched"), [("gpt2", None), ("modern", None), ("modern", "eager")])
def test_a_table_of_the_same_settings_is_the_same_optimizer_bit_for_bit(arch, batched):
    by_table, table = made(arch, "groups", batched=batched)
    by_name, muon = made(arch, "muon", batched=batched)
    for model, optimizer in ((by_table, table), (by_name, muon)):
        train(model, optimizer, 3)
    assert same(weights(by_table), weights(by_name))
    assert (table.parts["matrices"]._stacked is None) == (batched is None)


def table(**rows):
    return schema.build(optimizers.Config, SETTINGS["groups"] | {"groups": rows})


def test_a_later_group_takes_tensors_from_an_earlier_one_by_name():
    model, _ = made("gpt2")
    whole = GROUPS["embedding"] | {"tensors": ["*"]}
    projections = GROUPS["matrices"] | {"tensors": ["blocks.*.proj.weight"]}
    groups = table(all=whole, none=None, projections=projections, empty=whole | {"tensors": ["head"]}).tensors_of(model)
    assert list(groups) == ["all", "projections"]
    assert list(map(id, groups["projections"])) == [
        id(part.proj.weight) for block in model.blocks for part in (block.attention, block.mlp)
    ]
    assert len(groups["all"]) + 4 == len(list(model.parameters()))


def test_a_tensor_in_no_group_is_refused_by_its_name():
    model, _ = made("gpt2")
    message = "optim.groups=matrices: none has the tensor token_embedding.weight: add embedding, or its name, to"
    with pytest.raises(ValueError, match=message):
        table(matrices=GROUPS["matrices"]).build(model, 0, 1, "cpu")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.groups.head.lr=0", "optim.groups.head.lr=0: use a number above 0"),
        ("optim.groups.head.muon_lr=1", "unknown setting optim.groups.head.muon_lr=1"),
        ("optim.groups.head.tensors=head", "optim.groups.head.tensors=head: use a list of words"),
        ("optim.groups.head=3", "optim.groups.head=3: use a group of settings, KEY: VALUE, or null"),
        (
            "optim.groups.head.name=sgd",
            "=sgd: there is none of that name; choose from adamw, cautious_adam, muon, normuon",
        ),
    ],
)
def test_a_row_of_the_table_is_checked_like_any_setting(setting, message):
    with pytest.raises(ValueError) as error:
        compose.compose(["optim=groups", setting])
    assert message in str(error.value)


def test_a_row_of_the_table_is_part_of_the_config_and_its_id(tmp_path):
    config, other = (compose.compose(["optim=groups", *extra]) for extra in ([], ["optim.groups.head.lr=0.004"]))
    assert identity.config_id(config) != identity.config_id(other)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(schema.to_dict(other)))
    assert schema.read(tmp_path) == other and other.optim.groups["head"].lr == 0.004
    assert compose.compose(["optim=groups", "optim.groups.head=null"]).optim.groups["head"] is None


@pytest.mark.parametrize("name", ["muon", "groups"])
def test_muons_momentum_rises_in_a_line_and_stays(name):
    row = {"momentum_warmup_frac": 0.25}
    groups = GROUPS | {"matrices": GROUPS["matrices"] | row}
    changed = {"muon": {"muon_momentum_warmup_frac": 0.25}, "groups": {"groups": groups}}
    config = schema.build(optimizers.Config, SETTINGS[name] | changed[name])
    optimizer = config.build(models.load("modern")(**SHAPE), 0, 1, "cpu")
    momenta = []
    for step in (0, 5, 10, 39):  # of 40: the first 10 are a quarter
        config.set_step(optimizer, step, 40)
        momenta.append(optimizer.param_groups[-1]["momentum"])
    assert momenta == pytest.approx([0.85, 0.90, 0.95, 0.95])
    schema.build(optimizers.Config, SETTINGS[name]).set_step(optimizer, 0, 40)
    assert optimizer.param_groups[-1]["momentum"] == 0.95


@pytest.mark.parametrize("name", SETTINGS)
def test_a_copied_state_takes_up_where_it_was(name):
    model, optimizer = made("gpt2", name)
    train(model, optimizer, 2)
    middle_weights, middle_state = weights(model), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2, first_seed=2)

    other_model, other_optimizer = made("gpt2", name)
    with torch.no_grad():
        for parameter, middle in zip(other_model.parameters(), middle_weights):
            parameter.copy_(middle)
    other_optimizer.load_state_dict(middle_state)
    train(other_model, other_optimizer, 2, first_seed=2)
    assert same(weights(model), weights(other_model))


def prepared(world_size):
    return world_size


def rank_program(world_size):
    """All ranks get the same batches, so the same gradients, without DDP."""
    rank = distributed.start("cpu", 60).rank

    def share(batched=None, shapes=SHAPES):
        return after_five_steps(
            lambda matrices: our_muon(matrices, rank=rank, world_size=world_size, batched=batched), shapes
        )

    model, optimizer = made("modern", "muon", rank, world_size)
    train(model, optimizer, 3)
    ended = {"weights": weights(model), "num_momenta": len(optimizer.parts["muon"].state), "mixed": share()[0]}
    ended |= {"single": share(shapes=SHAPES[:1])[0], "changes": share("eager")[1]}
    distributed.barrier()
    distributed.stop()
    return ended


@pytest.fixture(scope="module", params=[2, slow(4)])
def ranks(tmp_path_factory, request):
    """What rank_program() answered on each rank."""
    return ranks_of("test_optimizers", request.param, tmp_path_factory.mktemp("ranks"))


def test_ranks_share_muons_work_and_end_with_the_weights_of_one(ranks):
    alone_model, alone_optimizer = made("modern", "muon")
    train(alone_model, alone_optimizer, 3)
    assert all(same(rank["weights"], weights(alone_model)) for rank in ranks)
    shares = [rank["num_momenta"] for rank in ranks]
    assert sum(shares) == len(alone_optimizer.parts["muon"].state) == 12
    assert min(shares) >= 12 // len(ranks) - 2


def test_matrices_of_all_shapes_come_back_from_the_other_ranks_whole(ranks):
    mixed, changes = after_five_steps(our_muon)
    single, _ = after_five_steps(our_muon, SHAPES[:1])  # a rank without a matrix of its own gets the update too
    for rank in ranks:
        assert same(rank["mixed"], mixed) and same(rank["single"], single)
        assert same(rank["changes"], ranks[0]["changes"])  # stacks, which differ from one by one by rounding
    assert_close(ranks[0]["changes"], changes)


def assert_close(ours, theirs, most_frac=0.01):
    """Allows what the order of adding moves a bfloat16 Newton-Schulz by; bfloat16 itself moves it by 1 to 2 %."""
    for shape, our_change, their_change in zip(SHAPES, ours, theirs, strict=True):
        assert (our_change - their_change).norm() <= most_frac * their_change.norm(), shape


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_stacked_muon_is_muon_one_by_one_but_for_rounding(products):
    _, stacked = after_five_steps(lambda matrices: our_muon(matrices, products=products, batched="eager"))
    _, plain = after_five_steps(lambda matrices: our_muon(matrices, products=products))
    assert_close(stacked, plain)


def test_stacks_hold_all_of_one_shape_and_its_transpose(monkeypatch):
    matrices = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer, shapes = our_muon(matrices, batched="eager"), []
    stacked = optimizer._stacked
    monkeypatch.setattr(optimizer, "_stacked", lambda X, *rest: shapes.append(tuple(X.shape)) or stacked(X, *rest))
    for matrix in matrices:
        matrix.grad = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert sorted(shapes) == [(1, 17, 40), (1, 32, 96), (1, 32, 128), (2, 1, 8), (2, 64, 64)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch's own modules, when inductor imports them
def test_compiled_stacks_are_the_eager_ones_but_for_rounding():
    _, compiled = after_five_steps(lambda matrices: our_muon(matrices, batched="compiled"))
    _, eager = after_five_steps(lambda matrices: our_muon(matrices, batched="eager"))
    assert_close(compiled, eager, most_frac=0.03)  # what inductor fuses it does not round in between


def test_every_optimizer_has_a_yaml_and_every_yaml_an_optimizer_that_trains():
    files = {path.stem for path in (ROOT / "models" / "optimizers").glob("*.py")} - {"__init__"}
    assert files == set(compose.choices("optim")) == set(SETTINGS)
    for name in files:
        optim = compose.compose([f"optim={name}"]).optim
        assert optim.name == name and optim.schedule.name == "trapezoid"
        optimizer = optim.build(models.load("modern")(**SHAPE), 0, 1, "cpu")
        peak_lr = max(group["peak_lr"] for group in optimizer.param_groups)
        assert peak_lr == {"adamw": 0.0018, "muon": 0.02, "groups": 0.3}[name]


SIGN_SGD = """
from dataclasses import dataclass
from models import optimizers
from models.settings import Frac

@dataclass(kw_only=True)
class Config(optimizers.Config):
    mix: Frac

    def build(self, model, rank, world_size, device_type):
        import torch
        return torch.optim.SGD([{"params": list(model.parameters()), "peak_lr": self.lr}], lr=self.lr * self.mix)
"""


@pytest.mark.slow
def test_a_new_optimizer_is_one_file_and_one_yaml(tmp_path):
    """A process in a copy composes it, checks its settings without torch and makes a step."""
    for name in ("bench", "conf", "models"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "models" / "optimizers" / "mixed.py").write_text(SIGN_SGD)
    yaml = "defaults:\n  - schedule: cosine\n  - _self_\n\nname: mixed\nlr: 0.1\nmix: 0.5\n"
    (tmp_path / "conf" / "optim" / "mixed.yaml").write_text(yaml)
    program = (
        "import sys\n"
        "from bench.config import compose, identity, schema\n"
        "for override in ('optim.mix=2', 'optim.muon_lr=0.1'):\n"
        "    try:\n"
        "        compose.compose(['optim=mixed', override])\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
        "config = compose.compose(['optim=mixed', 'optim.mix=1', 'optim.schedule.warmup_frac=0.1'])\n"
        "print('torch' in sys.modules, config.optim.mix, len(identity.config_id(config)))\n"
        "import models\n"
        "model = models.load('gpt2')(64, 16, 2, 2, 32)\n"
        "print(type(config.optim.build(model, 0, 1, 'cpu')).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "optim.mix=2: use a number from 0 to 1"
    assert lines[1] == "optim.muon_lr=0.1: this run has no such setting; only runs with optim=muon have it"
    assert lines[2:] == ["False 1.0 8", "SGD"]
