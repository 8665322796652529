"""The loss that the referee computes from logits: honest models are believed, lies in forward() or logits() are not."""

import copy
import json
import math
import re
from unittest import mock

import pytest
import staged
import torch

import models
from bench.base import stats
from bench.record import run_folder, validity
from bench.training import referee_loss as referee
from bench.training import run
from bench.training.referee_loss import NoLogits, RefereeLoss
from models.base import LanguageModel

LN_V = math.log(257)
PADDED = 320  # what gpt2's head has for 257 tokens
STEPS = 6


def judged(trainer, log, is_required=True):
    """Takes six steps with the referee around them and returns (its facts, (invalid, doubts))."""
    loss = RefereeLoss(trainer, is_required)
    loss.at_start()
    loss.evaluate()
    for step in range(STEPS):
        log.on_step_start(step)
        trainer.step(step)
        log.on_step_end(step)
    loss.evaluate()
    facts = loss.at_end(STEPS)
    trainer.close()
    json.dumps(facts, allow_nan=False)
    record = {"track": "cpu_nano" if is_required else "free", "metrics": {"val_loss": facts["val_loss"]}}
    return facts, validity.faults_of_run(record | {"referee": {"loss": facts}})


def judged_gpt2(monkeypatch=None, *overrides, is_required=True, **methods):
    """Returns judged() of a small gpt2 some of whose methods are replaced."""
    for name, method in methods.items():
        monkeypatch.setattr(models.load("gpt2"), name, method)
    trainer, log, _ = staged.trainer_of(*staged.SMALL, *overrides)
    return judged(trainer, log, is_required)


HONEST = models.load("gpt2").logits


def forward_of(self, tokens_BT, targets_BT):
    return LanguageModel.loss(self, HONEST(self, tokens_BT), targets_BT)


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_models_are_believed_and_their_loss_is_the_referees(arch, dtype):
    facts, faults = judged_gpt2(None, f"model={arch}", f"hardware.dtype={dtype}")
    assert faults == ([], [])
    assert [check["step"] for check in facts["checked"]] == [0, STEPS]
    for check in (*facts["checked"], facts["random_tokens"], facts["held_out"]):
        assert check["claimed_nats"] == pytest.approx(check["from_logits_nats"], abs=3e-6)
    assert facts["random_tokens"]["from_logits_nats"] > stats.least_nats(LN_V, 1024)
    assert 0 <= facts["random_tokens"]["se_nats"] < 0.1


def test_the_cross_entropy_is_torchs_and_takes_a_few_thousand_rows_at_a_time(monkeypatch):
    logits_BTV = 9 * torch.randn(3, 50, 11, generator=torch.Generator().manual_seed(0))
    targets_BT = torch.randint(11, (3, 50), generator=torch.Generator().manual_seed(1))
    wanted = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    most = []
    monkeypatch.setattr(referee, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(
        referee, "_nats", lambda rows, targets, nats=referee._nats: most.append(len(rows)) or nats(rows, targets)
    )
    assert torch.allclose(referee.nats_of(logits_BTV.bfloat16(), targets_BT), wanted, atol=0.2)
    assert torch.allclose(referee.nats_of(logits_BTV, targets_BT), wanted, atol=1e-5)
    assert most == [64, 64, 22] * 2


@pytest.mark.parametrize(("dtype", "factor", "less"), [("float32", 0.8, 0.0), ("bfloat16", 1.0, 0.003)])
def test_a_forward_that_returns_less_than_its_loss_in_evaluation_is_invalid_with_both_numbers(
    monkeypatch, dtype, factor, less
):
    def forward(self, tokens_BT, targets_BT):
        loss = forward_of(self, tokens_BT, targets_BT)
        return loss if self.training else factor * loss - less

    facts, (invalid, _) = judged_gpt2(monkeypatch, f"hardware.dtype={dtype}", forward=forward)
    last = facts["checked"][1]
    assert last["claimed_nats"] == pytest.approx(factor * last["from_logits_nats"] - less, rel=1e-5)
    claims = f"forward() gives {last['claimed_nats']:.6f} nats on the validation at step 6"
    assert any(claims in fault and f"its logits give {last['from_logits_nats']:.6f}" in fault for fault in invalid)


def test_logits_are_asked_for_a_few_rows_at_a_time(monkeypatch):
    calls = []

    def logits(self, tokens_BT):
        calls.append(tuple(tokens_BT.shape))
        return HONEST(self, tokens_BT)

    monkeypatch.setattr(referee, "MAX_TOKENS", 128)
    forward = models.load("gpt2").forward
    facts, faults = judged_gpt2(monkeypatch, logits=logits, forward=lambda *args: calls.append(None) or forward(*args))
    shapes = {shape for before, shape in zip([None, *calls], calls) if shape and before is not None}
    assert faults == ([], []) and shapes and max(rows * length for rows, length in shapes) <= 128


def test_targets_that_forward_has_seen_are_of_no_use_to_logits(monkeypatch):
    """They are kept, by the tokens that they follow, and make logits sharp: the validation itself is fooled by that."""
    seen = {}

    def forward(self, tokens_BT, targets_BT):
        if not self.training:
            seen[tokens_BT.numpy().tobytes()] = targets_BT
        return LanguageModel.loss(self, self.logits(tokens_BT), targets_BT)

    def logits(self, tokens_BT):
        targets_BT = seen.get(tokens_BT.numpy().tobytes())
        sharper = 0.0 if targets_BT is None else torch.nn.functional.one_hot(targets_BT, PADDED)
        return HONEST(self, tokens_BT) + sharper

    facts, (invalid, _) = judged_gpt2(monkeypatch, forward=forward, logits=logits)
    last = facts["checked"][1]
    assert last["claimed_nats"] == pytest.approx(last["from_logits_nats"], abs=3e-6)
    assert any("on a held-out slice of the validation data, but its logits give" in fault for fault in invalid)


def test_a_model_that_knows_the_validation_alone_is_doubted_by_the_held_out_slice(monkeypatch):
    """It looks the tokens up in the data that it has read by itself, in forward() and logits() alike."""
    memory = {}

    def logits(self, tokens_BT):
        rows = [memory.get(row.numpy().tobytes()) for row in tokens_BT]
        result_BTV = HONEST(self, tokens_BT)
        for b, row in enumerate(rows):
            if row is not None and not self.training:
                result_BTV[b] = result_BTV[b] + 20.0 * torch.nn.functional.one_hot(row, PADDED)
        return result_BTV

    monkeypatch.setattr(models.load("gpt2"), "logits", logits)
    monkeypatch.setattr(referee, "COUNTERFACTUAL_FRAC", 1.0)
    trainer, log, _ = staged.trainer_of(*staged.SMALL, "goal.val_tokens=16384")
    for tokens_BT, targets_BT in trainer.val_rows.at(trainer.val_rows.places):
        memory |= {row.numpy().tobytes(): targets for row, targets in zip(tokens_BT, targets_BT, strict=True)}
    facts, (invalid, doubts) = judged(trainer, log)
    assert invalid == [] and facts["val_loss"] < 0.1
    assert any("on a held-out slice of the same data" in doubt for doubt in doubts)
    assert any("its loss at step 0 is already" in doubt for doubt in doubts)


def test_random_tokens_show_a_model_that_sees_them(monkeypatch):
    def logits(self, tokens_BT):
        ahead_BT = tokens_BT.roll(-1, 1)
        return HONEST(self, tokens_BT) + 9.0 * torch.nn.functional.one_hot(ahead_BT, PADDED)

    facts, (invalid, _) = judged_gpt2(monkeypatch, logits=logits)
    assert facts["random_tokens"]["claimed_nats"] < LN_V / 2
    assert any("and a causal model is below" in fault and "standard error" in fault for fault in invalid)


def test_a_model_without_numbers_for_tokens_that_no_run_is_given_is_doubted():
    facts, faults = judged_gpt2()
    assert faults == ([], [])
    nothing = {"claimed_nats": None, "from_logits_nats": None}
    for key, where in (("random_tokens", "random tokens"), ("held_out", "a held-out slice")):
        assert validity.faults(facts | {key: facts[key] | nothing}) == ([], [f"its loss of {where} is not a number"])


def test_a_model_that_begins_trained_is_doubted(monkeypatch):
    frequent = torch.zeros(PADDED)
    frequent[ord(" ")] = 4.0
    monkeypatch.setattr(models.load("gpt2"), "logits", lambda self, tokens_BT: HONEST(self, tokens_BT) + frequent)
    _, (invalid, doubts) = judged_gpt2()
    assert invalid == []
    (doubt,) = doubts
    assert "its loss at step 0 is already" in doubt and "0.95 * ln(257) = 5.272" in doubt


NINE = "they are (8, 128, 9) for tokens of (8, 128) and a vocabulary of 257"


@pytest.mark.parametrize("logits, why", [(None, "it has none"), (lambda *args: HONEST(*args)[..., :9], NINE)])
def test_without_logits_a_run_ends_before_its_first_step_but_on_track_free(logits, why, monkeypatch):
    monkeypatch.setattr(models.load("gpt2"), "forward", forward_of)
    monkeypatch.setattr(models.load("gpt2"), "logits", logits)
    trainer, log, _ = staged.trainer_of(*staged.SMALL)
    loss = RefereeLoss(trainer, is_required=True)
    with pytest.raises(NoLogits, match=re.escape(f"model.arch=gpt2: its logits(tokens_BT) cannot be used ({why})")):
        loss.at_start()
    facts, faults = judged(trainer, log, is_required=False)
    assert facts["not_checked"] == why and faults == ([], [])


def test_what_the_logits_before_the_first_step_took_is_free_before_the_warm_up(monkeypatch):
    """Else it stays reserved, and the first steps ask the driver for the memory that it displaced."""
    calls, rank = mock.MagicMock(), mock.MagicMock(times={}, referee={})
    calls.warm_up.return_value = {"causality": {"found": "causal", "why": None, "sdpa_backends": []}}
    rank._trainer.warm_up = calls.warm_up
    monkeypatch.setattr(run, "RefereeLoss", lambda *_, **__: calls)
    monkeypatch.setattr(run, "StepLog", mock.Mock())
    monkeypatch.setattr(torch.cuda, "empty_cache", calls.empty_cache)
    run.Run._warm_up(rank)
    assert [call[0] for call in calls.method_calls] == ["at_start", "empty_cache", "warm_up"]


def test_logits_that_fail_at_the_end_make_the_run_suspect(monkeypatch):
    def logits(self, tokens_BT):
        if seen and not self.training and not inside:
            raise MemoryError("planted")
        return HONEST(self, tokens_BT)

    def forward(self, tokens_BT, targets_BT):
        inside.append(seen.append(1))
        try:
            return LanguageModel.forward(self, tokens_BT, targets_BT)
        finally:
            inside.clear()

    seen, inside = [], []
    trainer, log, _ = staged.trainer_of(*staged.SMALL)
    monkeypatch.setattr(models.load("gpt2"), "forward", forward)
    monkeypatch.setattr(models.load("gpt2"), "logits", logits)
    facts, (invalid, doubts) = judged(trainer, log)
    assert invalid == [] and doubts == ["its loss was not checked: MemoryError: planted"]
    assert facts["random_tokens"] is None and facts["checked"] == []


def test_it_leaves_weights_randomness_and_training_alone():
    trainer, _, _ = staged.trainer_of(*staged.SMALL)
    weights = copy.deepcopy(trainer.model.state_dict())
    rng, place = torch.get_rng_state(), trainer.loader.state_dict()
    loss = RefereeLoss(trainer, is_required=True)
    loss.at_start()
    nats = loss.evaluate()
    loss.at_end(0)
    assert torch.equal(torch.get_rng_state(), rng) and trainer.loader.state_dict() == place
    assert trainer.model.training and trainer.evaluate() == nats
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    trainer.close()


def test_long_runs_check_every_batch_and_short_ones_a_quarter():
    trainer, _, _ = staged.trainer_of(*staged.SMALL)
    loss = RefereeLoss(trainer, is_required=True)
    assert (loss._num_batches(40, 1.0), loss._num_batches(40, referee.START_FRAC)) == (10, 1)
    trainer.config.goal.num_steps = trainer.config.goal.val_every_steps = 10_000
    assert loss._num_batches(40, 1.0) == 40
    trainer.close()


def test_the_held_out_slice_lies_beyond_the_validation(monkeypatch):
    trainer, _, _ = staged.trainer_of(*staged.SMALL)
    places, at = [], trainer.val_rows.at
    monkeypatch.setattr(trainer.val_rows, "at", lambda wanted: places.extend(wanted) or at(wanted))
    RefereeLoss(trainer, is_required=True)._check_held_out()
    assert places and all(4096 <= place <= trainer.val_rows.num_tokens - 1025 for place in places)
    trainer.val_rows.num_tokens = 4097
    facts = RefereeLoss(trainer, is_required=True)._check_held_out()
    assert "hold 4097 tokens, and goal.val_tokens=4096 leaves too few for a batch" in facts["not_checked"]
    trainer.close()


def test_verify_finds_a_record_whose_facts_were_not_believed(finished_run):
    run = run_folder.read(finished_run)
    assert run["referee"]["loss"]["checked"][1]["step"] == run["metrics"]["num_steps"]
    assert validity.validity(copy.deepcopy(run))[0] != "invalid"
    run["referee"]["loss"]["checked"][1]["claimed_nats"] *= 0.8
    ruled, reasons = validity.validity(run)
    assert ruled == "invalid" and "val_loss is not this model's loss" in reasons[0]


def test_a_val_loss_that_is_not_the_one_that_was_checked_is_invalid(finished_run):
    run = run_folder.read(finished_run)
    run["metrics"]["val_loss"] -= 0.1
    ruled, reasons = validity.validity(run)
    assert ruled == "invalid" and "but the validation that the referee checked gave" in reasons[0]


def test_a_compiled_model_is_given_more_room(finished_run):
    assert [validity.bound_nats(dtype, True) for dtype in ("float32", "bfloat16")] == [1e-4, 3e-3]
    facts = run_folder.read(finished_run)["referee"]["loss"]
    facts["checked"][1]["claimed_nats"] -= 9e-5
    assert validity.faults(facts)[0] and not validity.faults(facts | {"is_compiled": True})[0]


def test_two_ranks_share_the_work(two_rank_run):
    facts = run_folder.read(two_rank_run)["referee"]["loss"]
    assert facts["validation"]["num_batches"] == 4 and facts["checked"][1]["num_tokens"] == 512
    assert validity.faults(facts)[0] == []


def test_a_bound_by_luck_is_what_a_million_honest_tries_give_once():
    """4,096 uniform tokens of 257, any model: below ln V - 13.8 / 4096."""
    assert stats.least_nats(LN_V, 4096) == pytest.approx(LN_V - 0.003373, abs=1e-6)
    assert stats.log_e_value(LN_V, LN_V - 0.003373, 4096) == pytest.approx(stats.MIN_LOG_E_VALUE, abs=1e-2)


def test_the_e_value_is_right_for_models_that_bet_on_luck():
    """Models whose every prediction is far from uniform: the share beyond 1 / alpha is at most alpha (here 0.05)."""
    generator = torch.Generator().manual_seed(0)
    num_false = 0
    for _ in range(2000):
        q_V = torch.softmax(0.5 * torch.randn(16, generator=generator), -1)
        tokens_N = torch.randint(16, (64,), generator=generator)
        nats = -q_V.log()[tokens_N].mean().item()
        num_false += stats.log_e_value(math.log(16), nats, 64) >= math.log(1 / 0.05)
    assert 0 < num_false <= 2000 * 0.05
