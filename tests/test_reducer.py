"""Gradients of several ranks: whole updates after the backward pass, and shares of them beside it, come to the same."""

from unittest import mock

import pytest
import real_runs
import staged
import torch
from cases import slow
from rank_forks import ranks_of
from test_run import numbers

from bench.config import compose, identity
from bench.config.resolve import resolve
from bench.config.schema import Machine
from bench.launch.prepare import prepare
from bench.machine import lazy_dynamo
from bench.training import distributed, reducer

SMALL = ["model=modern", "model.num_layers=2", "model.width=64", "model.num_heads=2", "data.seq_len=32"]
BATCH = ["data.batch_tokens=512", "goal.val_tokens=256", "hardware.micro_batch_seqs=4", "hardware.num_threads=1"]
OPTIMIZERS = {
    "adamw": ["optim=adamw"],
    "muon": ["optim=muon"],
    "groups": ["optim=groups"],
    # head rests for a step, embedding and head are updated in every second one
    "rests": ["optim=groups", "stages=[{update_every_steps:{embedding:2,head:2},frozen_steps:{head:1}}]"],
    "normuon": ["optim=groups", "optim.groups.matrices={name:normuon,lr:0.02,weight_decay:1.2}"],
    "parts": [  # the embedding is untied after a step, beside other tensors of its group
        *("model.arch=r53", "model.num_layers=4", "model.args={activations:float32,block:16}", "optim=groups"),
        "optim.groups.head={name:cautious_adam,lr:0.01,weight_decay:0.1,tensors:[embedding,head]}",
        "stages=[{until_step:1,window_tokens:32},{window_tokens:32,untied:true}]",
    ],
}
KINDS = ("null", "plain", "shard")


def job_of(world_size, *overrides):
    return prepare([*real_runs.SHORT, *SMALL, *BATCH, f"hardware.num_processes={world_size}", *overrides])


def trainer_of(ranks, job):
    """In buckets of 64 KiB: several, also of a small model."""
    with mock.patch.object(reducer, "BUCKET_BYTES", 2**16):
        return staged.trainer_of_job(job, ranks)[0]


def trained(ranks, job):
    """Warms a trainer up and takes three steps.  Returns its losses before and after, weights and size of its state."""
    trainer = trainer_of(ranks, job)
    trainer.warm_up()
    losses = [trainer.evaluate()]
    for step in range(3):
        trainer._instruments.on_step_start(step)
        trainer.step(step)
        losses.append(trainer.evaluate())
    held = sum(value.numel() for value in staged.tensors(trainer.optimizer.state_dict()) if value.ndim)
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.close()
    return {"losses": losses, "weights": weights, "num_state_elements": held}


def prepared(world_size):
    """Returns {(optim, kind): job}."""
    cases = {(optim, kind): [*OPTIMIZERS[optim], f"hardware.reducer={kind}"] for optim in OPTIMIZERS for kind in KINDS}
    return {key: job_of(world_size, *arguments) for key, arguments in cases.items()}


def rank_program(jobs):
    lazy_dynamo.install()  # as a rank of a run on CPUs does
    ranks = distributed.start("cpu", 60)
    by_job = {key: trained(ranks, job) for key, job in jobs.items()}
    distributed.stop()
    return by_job


@pytest.fixture(scope="module")
def alone():
    ranks = distributed.Ranks(0, 1, torch.device("cpu"))
    return {optim: trained(ranks, job_of(1, *overrides)) for optim, overrides in OPTIMIZERS.items()}


@pytest.fixture(scope="module", params=[2, slow(4)])
def ranks(request, tmp_path_factory):
    return ranks_of("test_reducer", request.param, tmp_path_factory.mktemp("reducer"))


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_one_process(alone, ranks, optim, kind):
    losses, most = ranks[0][optim, kind]["losses"], 2e-5 if optim == "adamw" else 2e-3
    assert losses == pytest.approx(alone[optim]["losses"], rel=most)
    assert losses[0] - losses[-1] > 0.02  # it learns


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_reference_is_what_torchs_own_reducer_does(ranks, optim):
    theirs, ours = (ranks[0][optim, kind]["losses"] for kind in ("null", "plain"))
    if len(ranks) == 2:  # a sum of two has one order
        assert theirs == ours
    assert ours == pytest.approx(theirs, rel=2e-5 if optim == "adamw" else 2e-3)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_shares_make_the_whole_update(ranks, optim):
    """Without clipping it is exact if a sum over ranks has one order; the norm of all gradients is added up again."""
    whole, share = (ranks[0][optim, kind] for kind in ("plain", "shard"))
    if optim != "adamw" and len(ranks) == 2:
        assert share["losses"] == whole["losses"]
        assert all(map(torch.equal, share["weights"], whole["weights"]))
    assert share["losses"] == pytest.approx(whole["losses"], rel=2e-6 if optim == "adamw" else 2e-3)


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_end_with_the_same_weights(ranks, optim, kind):
    first = ranks[0][optim, kind]["weights"]
    for other in ranks[1:]:
        assert [torch.equal(*pair) for pair in zip(first, other[optim, kind]["weights"])] == [True] * len(first)


def test_a_rank_keeps_the_state_of_its_share_alone(alone, ranks):
    shares = [rank["adamw", "shard"]["num_state_elements"] for rank in ranks]
    whole = alone["adamw"]["num_state_elements"]
    assert ranks[0]["adamw", "plain"]["num_state_elements"] == whole
    assert whole <= sum(shares) <= 1.1 * whole and len(set(shares)) == 1
    # NorMuon's mean squares, beside Muon's momenta: a number for each row of its matrices
    whole = alone["normuon"]["num_state_elements"] - alone["groups"]["num_state_elements"]
    for kind in KINDS:
        held = [[rank[optim, kind]["num_state_elements"] for optim in ("normuon", "groups")] for rank in ranks]
        mean_squares = [normuon - muon for normuon, muon in held]
        assert sum(mean_squares) == whole and min(mean_squares) > 0


def test_one_process_has_nothing_to_reduce_and_keeps_its_config_id():
    def made(*overrides):
        config = compose.compose([*SMALL, *BATCH, "hardware=cpu", *overrides])
        return resolve(config, Machine(0, 4), 257)

    assert made("hardware.reducer=shard").hardware.reducer is None
    assert identity.config_id(made("hardware.reducer=shard")) == identity.config_id(made())
    two = [made("hardware.num_processes=2", f"hardware.reducer={kind}") for kind in KINDS]
    assert [resolved.hardware.reducer for resolved in two] == [None, "plain", "shard"]
    assert len({identity.config_id(resolved) for resolved in two}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 8])
def test_a_run_with_shares_has_the_losses_of_one_process_and_says_so(tmp_path, finished_run, num_processes):
    run = finished_run
    several = [f"hardware.num_processes={num_processes}", "hardware.num_threads=1"]
    shared = real_runs.run(tmp_path, "seed=5", *several, "hardware.reducer=shard")
    assert numbers(shared) == pytest.approx(numbers(run), rel=2e-5)
    assert real_runs.run_json(shared)["measured"]["reducer"] == "shard"
    assert real_runs.run_json(run)["measured"]["reducer"] is None
