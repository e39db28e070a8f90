"""Money, from declared prices."""

import math

import pytest

from fedbudget.errors import UserError
from fedbudget.resources import RESOURCES
from fedbudget.resources.kinds import Prices
from fedbudget.resources.resource import Cost, Metering
from support.usage import usage


def test_rent_of_all_nodes_and_a_price_for_every_gigabyte() -> None:
    # 4 nodes at 9 an hour are 0.01 a second; 2 MB at 5 a gigabyte are 0.01.
    meter = RESOURCES["money"].meter(
        Metering(declared={"price_per_hour": 9.0, "price_per_gigabyte": 5.0})
    )
    cost = meter.read(usage(), Cost(0.5, 2.0))
    assert (cost.step, cost.aggregation) == pytest.approx((0.005, 0.03))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_prices_are_not_negative(value: float) -> None:
    for name in ("price_per_hour", "price_per_gigabyte"):
        with pytest.raises(
            UserError,
            match=f"{name.replace('_', '-')} must be a non-negative number",
        ):
            Prices(**{name: value})
