"""Training in stages is the runs of the stages one after the other, to the bit, warmed up and on several ranks."""

import copy
import functools
from unittest import mock

import pytest
import real_runs
import torch
from staged import SMALL, TWO_STAGES, trained, trainer_of

import models
from bench.data.course import Stream
from bench.record import verification
from bench.training import weights as saved_weights
from bench.training.model import mean_nats


@pytest.mark.parametrize("scale", [None, 3.0])
def test_two_stages_are_two_loops_by_hand(scale):
    """The second stage's gradients are of scale times its loss, which is reported as it is."""
    in_second = f",loss_scale:{scale}}}]" if scale else "}]"
    trainer, log, files = trainer_of(*SMALL, TWO_STAGES.replace("}]", in_second))
    losses, val_losses = trained(trainer, log)
    model = models.load("gpt2")(vocab_size=320, seq_len=128, num_layers=1, num_heads=2, width=32)
    model.init_weights(torch.Generator().manual_seed(0))
    config = trainer.config
    optimizer = config.optim.build(model, 0, 1, "cpu")
    tokens = torch.from_numpy(Stream(files["train"]).read(0, 7169).astype("int64"))
    position, by_hand = 0, []
    for num_steps, rows, seq_len, lr_frac in ((2, 8, 64, 1.0), (4, 12, 128, 0.5)):
        for _ in range(num_steps):
            span = tokens[position : position + rows * seq_len + 1]
            loss = model(span[:-1].view(rows, seq_len), span[1:].view(rows, seq_len))
            (loss if scale is None or num_steps == 2 else scale * loss).backward()
            if config.optim.grad_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip_norm)
            lr = config.optim.schedule.lr_frac(len(by_hand), 6) * config.optim.lr * lr_frac
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            by_hand.append(loss.item())
            position += rows * seq_len
    assert losses == by_hand
    assert val_losses[2] == pytest.approx(_val_loss(model, files, 128), abs=1e-12)


def _val_loss(model, files, seq_len):
    span = torch.from_numpy(Stream(files["val"]).read(0, 4097).astype("int64"))
    batch = (span[:-1].view(-1, seq_len), span[1:].view(-1, seq_len))
    with torch.no_grad():
        losses = [model(*piece) for piece in zip(batch[0].split(8), batch[1].split(8), strict=True)]
    return mean_nats(losses, 8 * seq_len, torch.device("cpu"))


def test_one_stage_is_a_run_without_stages_to_the_bit():
    plain = trained(*trainer_of(*SMALL)[:2])
    assert trained(*trainer_of(*SMALL, "stages=[{lr_frac:1.0}]")[:2]) == plain


def test_parts_are_updated_when_they_are_due_on_the_sum_of_their_gradients(monkeypatch):
    overrides = ["optim=groups", "stages=[{momenta:{matrices:0.5,embedding:0.7},update_every_steps:{matrices:2}}]"]
    trainer, _, _ = trainer_of(*SMALL, *overrides)
    embedding, matrix = next(trainer.model.parameters()), trainer.model.hidden_matrices()[0]
    parts = trainer.optimizer.parts
    used, step_of = [], trainer.optimizer.step
    monkeypatch.setattr(trainer.optimizer, "step", lambda names: used.append(matrix.grad.clone()) or step_of(names))
    alone, changed = [], []
    for step in range(4):
        alone.append(_gradient_alone(trainer, step))
        before = embedding.detach().clone(), matrix.detach().clone()
        trainer.step(step)
        after = embedding, matrix
        changed.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
        assert (matrix.grad is None) == (step % 2 == 1)
    assert changed == [[True, False], [True, True], [True, False], [True, True]]
    torch.testing.assert_close(used[1], alone[0] + alone[1])
    torch.testing.assert_close(used[3], alone[2] + alone[3])
    assert parts["matrices"].param_groups[0]["momentum"] == 0.5
    assert parts["embedding"].param_groups[0]["betas"] == (0.7, 0.95)
    trainer.close()


def _gradient_alone(trainer, step):
    """Returns the gradient of the first hidden matrix for one step's tokens and the weights as they are."""
    model = copy.deepcopy(trainer.model)
    model.zero_grad()
    trainer.loader.load_state_dict({"step": step, "micro_step": 0})
    model(*trainer.loader.next()).backward()
    trainer.loader.load_state_dict({"step": step, "micro_step": 0})
    return model.hidden_matrices()[0].grad


PARTING = ["experiment=r53", "model.num_layers=4", "model.width=32", "model.num_heads=2", "model.args.block=16"]
PARTING += ["data.seq_len=128", "data.batch_tokens=512", "goal.val_seq_len=128", "goal.val_tokens=4096"]
PARTING += ["goal.num_steps=6", "hardware=cpu", "hardware.num_threads=1", "model.args.activations=float32"]
PARTING += ["data=pysource", "goal.target_val_loss=null", "goal.val_every_steps=3"]
PARTS = "update_every_steps:{embedding:2,head:2,vectors:2,skips:2,smear:2}"
PARTING += [
    f"stages=[{{until_step:4,window_tokens:32,{PARTS},ahead_weights:[1.0,0.5],end_ahead_weights:[1.0,0.0]}},"
    f"{{window_tokens:32,{PARTS},untied:true,frozen_steps:{{vectors:1}}}}]"
]


def without_copies(set_ahead_weights, weights):
    """Called in each step, in which a tensor made of numbers would be a copy for which the host waits on a GPU."""
    with mock.patch("torch.tensor", side_effect=AssertionError):
        set_ahead_weights(weights)


def test_an_embedding_parts_as_the_head_is_and_what_is_frozen_rests(monkeypatch):
    trainer, _, _ = trainer_of(*PARTING)
    model, state = trainer.model, trainer.optimizer.parts["head"].state
    monkeypatch.setattr(model, "set_ahead_weights", functools.partial(without_copies, model.set_ahead_weights))
    embedding, head, scalar = model.embedding.weight, model.head.weight, model.smear_weight
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.warm_up()
    assert all(value.equal(drawn[name]) for name, value in model.state_dict().items())
    assert not model.untied and not any(value.any() for value in (*state[embedding].values(), *state[head].values()))
    ahead = []
    for step in range(4):
        trainer.step(step)
        ahead.append(model.ahead_weights.tolist())
    assert ahead == [[1.0, 0.5], [1.0, 0.375], [1.0, 0.25], [1.0, 0.125]]
    assert embedding.equal(drawn["embedding.weight"]) and embedding.grad is None
    assert state[head]["step"] == 2  # updated in every second step
    tied = trainer.evaluate()  # in the state of the step that comes next
    assert embedding.equal(head) and state[embedding]["exp_avg"].equal(state[head]["exp_avg"])
    assert state[embedding]["step"] == 2 and model.ahead_weights is None
    model.untied = False
    assert trainer.evaluate() == tied
    model.untied = True
    rested = scalar.detach().clone()
    trainer.step(4)
    assert scalar.grad is None and head.grad is not None  # a frozen part's gradient is dropped, another's is kept
    trainer.step(5)
    assert not scalar.equal(rested) and not embedding.equal(head) and state[embedding]["step"] == 3
    trainer.close()


@pytest.mark.slow
def test_a_run_whose_embedding_parts_is_the_same_on_several_ranks(tmp_path):
    losses, embeddings = [], []
    for world_size, reducer in ((1, "null"), (2, "null"), (2, "plain"), (4, "shard")):
        overrides = [f"hardware.num_processes={world_size}", f"name=w{world_size}-{reducer}", "checkpoint.save=true"]
        overrides.append(f"hardware.reducer={reducer}")
        folder = real_runs.run(tmp_path, *PARTING, "track=free", *overrides)
        assert [fault for fault in verification.report(folder)["rules"] if _is_fault(fault)] == []
        rows = real_runs.steps(folder)
        losses.append([float(row["train_loss"]) for row in rows[1:]] + [float(rows[-1]["val_loss"])])
        embeddings.append(saved_weights.read(folder / saved_weights.FILE)["embedding.weight"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-4) and losses[2] == pytest.approx(losses[1], rel=2e-6)
    assert losses[3] == pytest.approx(losses[0], rel=2e-4)
    first, *others = embeddings  # in no loss before it parts, so that its gradient is reduced by itself
    for two in others:
        assert (two - first).abs().mean() < 6e-6  # 7e-7; 4e-5 with the gradients of a rank's own tokens alone


def test_the_warm_up_warms_every_stage_and_leaves_no_trace(monkeypatch):
    trainer, _, _ = trainer_of(*SMALL, "experiment=stages", "goal.num_steps=6")
    seen, forward = [], trainer.model.forward

    def watched(tokens_BT, targets_BT):
        seen.append((tuple(tokens_BT.shape), trainer.model.window_tokens, torch.is_grad_enabled()))
        return forward(tokens_BT, targets_BT)

    monkeypatch.setattr(trainer.model, "forward", watched)
    weights = copy.deepcopy(trainer.model.state_dict())
    trainer.warm_up()
    warm = set(seen)
    assert {((8, 64), 32, True), ((8, 128), 64, True), ((16, 128), 64, True), ((16, 128), 96, True)} < warm
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.loader.state_dict() == {"step": 0, "micro_step": 0}
    assert trainer.model.window_tokens == 32
    state = [
        value for part in trainer.optimizer.parts.values() for slot in part.state.values() for value in slot.values()
    ]
    assert state and not any(value.any() for value in state)
    seen.clear()
    for step in range(6):
        trainer.evaluate() if step % 3 == 0 else None
        trainer.step(step)
    trainer.evaluate()
    trainer.close()
    assert set(seen) <= warm  # no graph is new once the clock runs
    assert {window for _, window, has_gradients in seen if not has_gradients} == {128}


def test_no_stage_compiles_anything_once_the_clock_runs(monkeypatch):
    graphs, compiled = [], torch.compile
    backend = functools.partial(compiled, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(torch, "compile", backend)
    trainer, _, _ = trainer_of(*SMALL, "experiment=stages", "goal.num_steps=6", "hardware.compile=true")
    try:
        assert torch._dynamo.config.recompile_limit >= 10  # four shapes with gradients and without, and two more
        trainer.warm_up()
        num_warm = len(graphs)
        assert num_warm >= 4  # shapes of training, and one of validation
        trained(trainer, trainer._log)
        assert len(graphs) == num_warm
    finally:
        torch._dynamo.reset()


def test_without_a_window_of_its_own_validation_has_that_of_the_next_step(monkeypatch):
    trainer, _, _ = trainer_of(
        *SMALL, "model=windowed", "stages=[{until_step:3,window_tokens:16},{first_window_tokens:32,window_tokens:64}]"
    )
    windows = []
    monkeypatch.setattr(
        trainer.model,
        "set_window",
        lambda tokens: windows.append(tokens) or vars(trainer.model).update(window_tokens=tokens),
    )
    trainer.warm_up()
    windows.clear()
    seen = []
    for step in range(6):
        trainer.evaluate()
        seen.append(trainer.model.window_tokens)
        trainer.step(step)
    trainer.evaluate()
    assert [*seen, trainer.model.window_tokens] == [16, 16, 16, 32, 32, 48, 64]
    assert windows == [32, 48, 64]  # it is called where the window changes and not else
    trainer.close()


@pytest.mark.slow
def test_the_losses_are_those_of_every_world_size_and_each_record_verifies(tmp_path):
    base = ["experiment=stages", "model.num_layers=1", "model.width=32", "model.num_heads=2", "data.bos_aligned=true"]
    base += ["data.seq_len=128", "data.batch_tokens=1024", "goal.val_tokens=4096"]
    curves = []
    for world_size in (1, 2, 8):
        folder = real_runs.run(
            tmp_path, *base, f"hardware.num_processes={world_size}", "hardware.num_threads=1", f"name=w{world_size}"
        )
        assert [fault for fault in verification.report(folder)["rules"] if _is_fault(fault)] == []
        rows = real_runs.steps(folder)
        assert [int(row["tokens"]) for row in rows] == [0, 512, 1024, 2048, 3072, 5120, 7168]
        curves.append([float(row["train_loss"]) for row in rows[1:]] + [float(rows[-1]["val_loss"])])
    for losses in curves[1:]:
        assert losses == pytest.approx(curves[0], rel=2e-4)


def _is_fault(rule):
    """A clock may be wrong where eight processes share two cores; what was counted may not."""
    return not rule["passed"] and "time" not in rule["rule"]
