"""The guard catalogue: when an event is refused, with the words of the refusal."""

from __future__ import annotations

from states.resources import Fact
from states.spec import Guard

GUARDS = (
    Guard(
        "arrived",
        "weights are still on their way to the device",
        "They are waited for by themselves.",
        forbids=[Fact.ARRIVING],
        first="arrive",
    ),
    Guard(
        "optimizer_arrived",
        "optimizer state is still on its way to the device",
        "It is waited for by itself.",
        forbids=[Fact.OPTIMIZER_ARRIVING],
        first="arrive_optimizer",
    ),
    Guard(
        "no_phase",
        "a training phase is open",
        "Call end_training() or abort_training() first.",
        forbids=[Fact.WORKING],
    ),
    Guard("in_phase", "no training phase is open", "Call begin_training() first.", requires=[Fact.WORKING]),
    Guard("no_load", "a load is open", "Leave the loading() block first.", forbids=[Fact.LOADING]),
    Guard("in_load", "no load is open", "Use loading(tag).", requires=[Fact.LOADING]),
    Guard(
        "no_scope",
        "a using() or hold() scope is open",
        "Leave it first; leaving the outermost goes back to sleep by itself.",
        forbids=[Fact.SCOPE_OPEN],
    ),
    Guard(
        "no_backward_left",
        "gradients of a backward outside any phase are left",
        "Step the optimizer, or give them up with discard_grads() or zero_grad().",
        forbids=[Fact.BACKWARD_LEFT],
    ),
    Guard(
        "no_device_reader",
        "weights() is reading the device",
        "Leave the weights() block first.",
        forbids=[Fact.DEVICE_LEASED],
    ),
    Guard("no_reader", "a weights() block is open", "Leave the weights() block first.", forbids=[Fact.LEASED]),
    Guard("memory_free", "too little memory is free", "Release memory elsewhere first.", forbids=[Fact.MEMORY_SHORT]),
    Guard(
        "addresses_free",
        "CUDA graphs may have been captured over memory whose addresses this backend can not keep",
        "Use the torch_memory_saver backend, or drop the graphs.",
        forbids=[Fact.GRAPHS_PIN_ADDRESSES],
    ),
    Guard(
        "has_optimizer",
        "no optimizer is attached",
        "Give one to ActorLifecycle(optimizer=...).",
        forbids=[Fact.NO_OPTIMIZER],
    ),
    Guard("not_closing", "closing had begun", "Call close() again.", requires=[Fact.HOOKS]),
    Guard("not_actor", "'actor' follows training", "Move another tag.", forbids=[Fact.TAG_IS_ACTOR]),
    Guard("not_shown", "the device shows this tag", "Switch to another tag first.", forbids=[Fact.TAG_IS_SHOWN]),
    Guard(
        "of_frozen",
        "the other tag points at a working version",
        "End the training phase first.",
        forbids=[Fact.OF_WORKING],
    ),
    Guard(
        "rotation_hidden",
        "the rotation would move 'actor' or the tag that the device shows",
        "Rotate other tags, or switch away first.",
        forbids=[Fact.ROTATES_SHOWN],
    ),
)
