"""A backend that gives other addresses back lets an actor sleep under captured graphs (F051:
https://github.com/Snowflake-AI-Research/Arctic-Platform/pull/8)."""

from attrs import evolve

from tests.checker.machines.variants import SMALL, model, without_guard

MACHINE = model(without_guard("addresses_free", "sleep"), evolve(SMALL, keeps_addresses=False))
INVARIANT = "graphs_stay_valid"
LENGTH = 2
