"""What happens when even the way out fails."""

from __future__ import annotations

import sys

import pytest
import torch
from attrs import evolve
from scenarios import assert_equal_weights, engine, load_noise, make_actor, make_busy, train, weights_of

from lifecycle import (
    ActorLifecycle,
    Faulted,
    LifecycleError,
    ManifestError,
    MissingExtra,
    NotBroughtBack,
    RanksDisagree,
    TransitionRefused,
)
from lifecycle.testing.injection import Injected, failing


def busy():
    actor, model, optimizer = make_actor()
    make_busy(actor, model, optimizer)
    return actor, model, optimizer


def test_sync_that_can_not_be_ended_is_a_fault():
    """A failed sync whose own ending fails leaves FAULTED, and recover() brings back every tag."""
    actor, _, _ = busy()
    actor.sleep()
    expected = weights_of(actor)
    one = engine()
    one.fail_on.add("begin_update")

    with failing(actor, "lower_sync_groups"), pytest.raises(LifecycleError) as error:
        actor.sync(one)

    assert actor.state.name == "FAULTED"
    assert "ending the sync failed too" in "".join(error.value.__notes__)
    actor.recover()
    assert_equal_weights(expected, weights_of(actor))


def test_first_exception_of_a_scope_is_the_one_raised():
    """When the block raises and going back fails too, the block's error comes out, with the other as a note."""
    actor, model, _ = busy()
    actor.sleep()

    def leave_a_backward():
        model(torch.arange(16)).sum().backward()  # left over, so that going back to sleep is refused
        raise KeyError("first")

    with pytest.raises(KeyError) as error, actor.hold():
        leave_a_backward()

    assert "leaving the scope failed too" in error.value.__notes__[0]
    assert actor.state.name == "RESIDENT"


def test_forced_close_with_an_open_phase():
    """A phase that can not be aborted does not keep the actor open; what the device holds stays."""
    actor, model, optimizer = busy()
    actor.begin_training()
    optimizer.zero_grad()
    weight = model.body.weight.detach().clone()

    with failing(actor, "settle_phase"):
        with pytest.raises(LifecycleError):
            actor.close()
        assert actor.state.name == "RESIDENT"
        actor.close(force=True)

    assert actor.state.name == "CLOSED"
    assert torch.equal(model.body.weight, weight)


def test_forced_close_with_an_open_load():
    """A load that can not be aborted does not keep the actor open; the actor's weights come back from their copy."""
    actor, model, _ = busy()
    weight = model.body.weight.detach().clone()
    actor._fire("load", tag="ref")
    model.body.weight.data.zero_()

    with failing(actor, "drop_load"):
        actor.close(force=True)

    assert actor.state.name == "CLOSED"
    assert torch.equal(model.body.weight, weight)


def test_forced_close_gives_up_what_is_spoiled():
    """A spoiled copy of a sleeping actor refuses an ordinary close; by force it is closed without it."""
    actor, _, _ = make_actor(host="shared")
    actor.sleep()
    buffer = next(
        buffer
        for part, buffer in actor._world.buffers.items()
        if part in actor.facts.version_of("actor").parts.values()
    )
    actor._world.pool.unseal(buffer)
    buffer.memory[0:8] = b"\xff" * 8

    with pytest.raises(LifecycleError):
        actor.close()
    actor.close(force=True)

    assert actor.state.name == "CLOSED"


def test_plan_adds_up_its_bytes():
    """A plan's bytes are those of its effects, and acting moves just as many."""
    actor, model, optimizer = busy()
    load_noise(actor, model, "ref", 3)
    train(actor, model, optimizer)
    plan = actor.plan("sleep")
    before = actor.traffic.device_to_host
    actor.sleep()

    assert plan.nbytes == sum(effect.nbytes for effect in plan.effects) > 0
    assert actor.traffic.device_to_host - before <= plan.nbytes
    assert actor.plan("wake_up").target == "RESIDENT"


def test_manifest_names_every_tensor():
    """The manifest lists each owned tensor once, with its place."""
    actor, model, _ = busy()
    named = {spec.name for layout in actor.manifest.layouts.values() for spec in layout}

    assert set(dict(model.named_parameters(remove_duplicate=False))) <= named
    assert {"scale", "table", "norm.running_mean"} <= named
    assert actor.manifest.nbytes == sum(actor.memory.held().values())


def test_missing_torch_names_the_extra(monkeypatch):
    """Without torch the error says what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="torch"):
        ActorLifecycle(None)


def test_disk_store_by_name(tmp_path):
    """host="disk:PATH" keeps copies in files that nobody else can open by name."""
    actor, model, _ = make_actor(host=f"disk:{tmp_path}")
    weight = model.body.weight.detach().clone()
    actor.sleep()

    assert actor.source("actor") == "disk"
    actor.wake_up()
    assert torch.equal(model.body.weight, weight)


def test_unknown_store_names_the_known_ones():
    """A misspelt store is refused with the known names."""
    with pytest.raises(ValueError, match="'pinned', 'shared'"):
        make_actor(host="pined")


def test_ranks_disagree_says_who_said_what():
    """The error keeps what each rank proposed."""
    error = RanksDisagree({0: "sleep", 1: "wake_up"})

    assert error.per_rank == {0: "sleep", 1: "wake_up"}
    assert "rank 1: wake_up" in str(error)


def test_event_from_inside_an_effect_is_refused():
    """An effect that asks for another event is refused, and its own event is undone."""
    actor, _, _ = busy()
    settle = actor._world.adapter.settle

    def meddle():
        actor.switch("ref")

    actor._world.adapter.settle = meddle
    actor._world._perform["settle"] = lambda *_: (meddle(), 0)
    with pytest.raises(TransitionRefused, match="asked from inside"):
        actor.sleep()
    actor._world._perform["settle"] = lambda *_: (settle(), 0)

    assert actor.state.name == "RESIDENT"
    actor.sleep()


def test_faulted_says_what_is_lost():
    """After a fault every event is refused with the effect that failed and what to do."""
    actor, _, _ = busy()
    with failing(actor, "pause_regions", error=Injected), pytest.raises(LifecycleError):
        actor.sleep()

    with pytest.raises(Faulted, match="pause_regions failed half-way"):
        actor.wake_up()


def test_plan_of_an_unknown_event_names_the_known_ones():
    """A misspelt event is no refusal but an error of the caller."""
    with pytest.raises(ValueError, match="unknown event 'slep'"):
        busy()[0].plan("slep")


def test_another_process_is_refused(monkeypatch):
    """In a process that did not attach the actor every event is refused."""
    actor, _, _ = busy()
    with monkeypatch.context() as patch:
        patch.setattr("lifecycle.steps.os.getpid", lambda: 1)
        with pytest.raises(TransitionRefused, match="forked"):
            actor.sleep()
    actor.sleep()


def test_views_that_hang_elsewhere_are_not_sent():
    """Engines get what a checkpoint has; a view kept as a plain attribute is owned, but is no weight."""
    model = torch.nn.Linear(4, 4)
    model.alias = model.weight.detach()
    actor = ActorLifecycle(model, None, tags=("ref",))
    one = engine()
    actor.sync(one)

    assert one.weights.keys() == {"weight", "bias"}
    actor.close()


def test_copy_that_stops_half_way_is_no_copy():
    """A copy to the host that raises gives its buffer back, and the next attempt makes a whole one."""
    actor, _, _ = busy()
    expected, backend = weights_of(actor), actor._world.backend
    in_use = actor._world.pool.in_use
    copy_out = backend.copy_out

    def broken(slot, buffer):
        raise OSError("stopped")

    backend.copy_out = broken
    with pytest.raises(LifecycleError):
        actor.sleep()
    assert actor._world.pool.in_use == in_use
    backend.copy_out = copy_out
    actor.sleep()

    assert_equal_weights(expected, weights_of(actor))


def test_close_tells_what_it_could_not_bring_back(tmp_path):
    """Closing a faulted actor does what it can, and what fails is told in the journal. Without its weights it is closed
    only by force."""
    actor, _, _ = busy()
    actor.sleep()
    with failing(actor, {"restore_rest", "pause_resumed"}), pytest.raises(LifecycleError):
        actor.wake_up("ref")

    def broken(*_):
        raise OSError("gone")

    actor._world._bring_slot = broken
    actor._world.adapter.reload_groups = broken
    with pytest.raises(NotBroughtBack, match=r"trained: gone.*close\(force=True\)"):
        actor.close()
    assert actor.state.name == "FAULTED"
    actor.close(force=True)
    assert actor.state.name == "CLOSED"

    notes = [record.note for record in actor.journal if record.kind == "note"]
    assert any("not brought back: gone" in note for note in notes)
    assert any("groups not brought back: gone" in note for note in notes)


def cast(model):
    model.half()


def rebind(model):
    model.head.weight.data = model.head.weight.data.clone()


@pytest.mark.parametrize("change", [cast, rebind])
@pytest.mark.parametrize("away", [ActorLifecycle.sleep, lambda actor: actor.switch("ref")], ids=["sleep", "switch"])
def test_close_refuses_a_model_that_its_weights_do_not_fit_any_more(change, away):
    """Nothing is lost: as often as it is asked, its weights stay in their copies, until they are given up by force."""
    actor, model, _ = busy()
    away(actor)
    state = str(actor.state)
    with actor.weights("actor") as views:
        expected = {name: view.clone() for name, view in views.items()}
    change(model)

    for _ in range(2):
        with pytest.raises(ManifestError, match=r"weights\(tag\).*close\(force=True\)"):
            actor.close()
        assert str(actor.state) == state
        with actor.weights("actor") as views:
            assert all(torch.equal(view, expected[name]) for name, view in views.items())
    actor.close(force=True)
    assert actor.state.name == "CLOSED"


def test_close_of_a_faulted_actor_tells_that_a_copy_is_gone():
    """There is nothing to bring back from: that is no reason to end as if all were well."""
    actor, _, _ = busy()
    actor.sleep()
    with failing(actor, {"restore_rest", "pause_resumed"}), pytest.raises(LifecycleError):
        actor.wake_up()
    lost = actor.facts.version_of("actor").parts["trained"]
    actor._world.buffers.pop(lost)

    with pytest.raises(NotBroughtBack, match="trained: there is no copy of it any more"):
        actor.close()
    actor.close(force=True)
    assert actor.state.name == "CLOSED"


def test_sync_whose_undoing_fails_is_a_fault():
    """Where engines could not even be told, the actor is FAULTED and keeps every tag."""
    actor, _, _ = busy()
    expected = weights_of(actor)

    with failing(actor, {"send_weights", "abort_updates"}), pytest.raises(LifecycleError):
        actor.sync(engine())

    assert actor.state.name == "FAULTED"
    actor.recover()
    assert_equal_weights(expected, weights_of(actor))


def test_lost_optimizer_state_is_named():
    """With the weights released and the optimizer's only copy gone, recover() says so and stays FAULTED."""
    actor, _, _ = busy()
    actor.sleep()
    with failing(actor, {"restore_rest", "pause_resumed"}), pytest.raises(LifecycleError):
        actor.wake_up("ref")
    for region in ("weights", "rest"):
        actor._world.backend.pause(region)
    actor._executor.look_again()
    lost = actor.facts.backups["optimizer"]
    copies = {part: place for part, place in actor.facts.copies.items() if part != lost}
    actor._executor.facts = evolve(actor.facts, copies=copies)

    with pytest.raises(Faulted) as error:
        actor.recover()

    assert "optimizer" in str(error.value.__cause__)
    assert actor.state.name == "FAULTED"


def test_a_copy_made_again_that_fails_keeps_its_buffer():
    """Where a doubted copy is written anew and that fails, its buffer stays its part's: readers may have it."""
    actor, _, _ = busy()
    actor.sleep()
    actor.wake_up()
    world = actor._world
    part = actor.facts.version_of("actor").parts["trained"]
    in_use, buffer = world.pool.in_use, world.buffers[part]

    def broken(*_):
        raise OSError("stopped")

    world.backend.copy_out = broken
    with pytest.raises(OSError, match="stopped"):
        world._keep_copy("trained", part)

    assert world.pool.in_use == in_use
    assert world.buffers[part] is buffer
