"""Vectors with fewer bits: what is lost is bounded, and what is lost does not add up."""

from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedbudget.arrays import Float32, Float64
from fedbudget.protocol.compression import (
    BroadcastCompressor,
    Kind,
    decode,
    encode,
    encoded_size,
    with_feedback,
)
from fedbudget.protocol.messages import LocalError, PeerError

LARGEST = float(np.finfo(np.float32).max)
FEWER: tuple[Kind, ...] = ("16-bit", "8-bit")
KINDS: tuple[Kind, ...] = ("none", *FEWER)
kinds, fewer = st.sampled_from(KINDS), st.sampled_from(FEWER)


@st.composite
def vectors(
    draw: st.DrawFn, smallest: float = 1e-30, largest: float = 1e30, *, most: int = 600
) -> Float32:
    """Numbers of any mix of magnitudes, zeros among them; often more than a block, seldom a
    multiple of it.
    """
    count, seed = draw(st.integers(0, most)), draw(st.integers(0, 2**32 - 1))
    low, high = sorted(
        draw(st.tuples(*[st.floats(np.log10(smallest), np.log10(largest))] * 2))
    )
    rng = np.random.default_rng(seed)
    magnitudes = 10.0 ** rng.uniform(low, high, count)
    vector: Float32 = (
        magnitudes * rng.choice([-1, 0, 1], count, p=[0.45, 0.1, 0.45])
    ).astype(np.float32)
    return vector


def passed(kind: Kind, vector: Float32) -> Float32:
    return decode(kind, encode(kind, vector), vector.size)


def largest_of_block(vector: Float32) -> Float64:
    """For each number, the largest magnitude among the 256 that it is sent with; one number
    after the other.
    """
    magnitudes = np.abs(vector.astype(np.float64))
    return np.array(
        [magnitudes[i - i % 256 : i - i % 256 + 256].max() for i in range(len(vector))]
    )


def bound(kind: Kind, vector: Float32) -> Float64:
    """By how much each number may be off, worked out by hand."""
    largest = largest_of_block(vector)
    if kind == "none":
        return np.zeros(len(vector))
    if kind == "8-bit":  # half of a 127th; and float32's own roundings
        return largest * (1 / 254 + 2**-21)
    # Half of the last of 11 bits; and of a number that is tiny beside its block's largest,
    # half of 2^-24 when that is between 2^14 and 2^15.
    return np.maximum(np.abs(vector.astype(np.float64)) * 2**-11, largest * 2**-39)


class TestRoundTrip:
    @given(kinds, vectors())
    def test_no_number_is_off_by_more_than_its_bits_allow(
        self, kind: Kind, vector: Float32
    ) -> None:
        off = np.abs(passed(kind, vector).astype(np.float64) - vector)
        assert (off <= bound(kind, vector)).all()

    @given(kinds, st.floats(1, 9.99), st.integers(-30, 29))
    def test_one_number_of_any_magnitude_passes(
        self, kind: Kind, digits: float, power: int
    ) -> None:
        number = np.float32(digits * 10.0**power)
        arrived = passed(kind, np.array([number, -number, 0]))
        assert arrived == pytest.approx([number, -number, 0], rel=2**-11, abs=0)

    @given(kinds, arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32)))
    @example("16-bit", np.array([LARGEST, -LARGEST], np.float32))
    @example("8-bit", np.array([LARGEST, -LARGEST], np.float32))
    @example("16-bit", np.array([1e-45, -1e-40], np.float32))
    @example("8-bit", np.array([1e-45, -1e-45], np.float32))
    def test_what_is_finite_arrives_finite_and_nothing_else_does(
        self, kind: Kind, vector: Float32
    ) -> None:
        assert np.isfinite(passed(kind, vector)).tolist() == np.isfinite(vector).tolist()

    @given(
        st.sampled_from(FEWER),
        vectors(),
        st.sampled_from([np.inf, -np.inf, np.nan]),
        st.randoms(),
    )
    def test_what_is_not_finite_spoils_no_other_number(
        self, kind: Kind, vector: Float32, odd: float, draw: Random
    ) -> None:
        places = draw.sample(range(len(vector)), min(len(vector), 3))
        without, broken = vector.copy(), vector.copy()
        without[places], broken[places] = 0, odd
        arrived, others = passed(kind, broken), np.delete(np.arange(len(vector)), places)
        assert not np.isfinite(arrived[places]).any()
        assert np.array_equal(arrived[others], passed(kind, without)[others])

    @pytest.mark.parametrize("kind", KINDS)
    def test_numbers_next_to_both_ends_of_float32_pass(self, kind: Kind) -> None:
        ends = np.array([LARGEST, -LARGEST, LARGEST / 3], np.float32)
        assert passed(kind, ends) == pytest.approx(ends, rel=1 / 84)
        tiny = np.array(
            [1e-45, -3e-42], np.float32
        )  # the smallest there is, and one beside it
        assert passed(kind, tiny) == pytest.approx(tiny, rel=2**-11, abs=3e-42 / 254)

    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_and_zeros_stay_what_they_are(self, kind: Kind) -> None:
        assert encode(kind, np.zeros(0, np.float32)) == b""
        assert passed(kind, np.zeros(0, np.float32)).tolist() == []
        assert passed(kind, np.zeros(300, np.float32)).tolist() == [0.0] * 300

    def test_16_bits_keep_every_half_as_it_is_and_every_power_of_two_of_it(self) -> None:
        halves = (
            np.arange(0x0400, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
        )  # all normal ones
        assert np.array_equal(passed("16-bit", halves), halves)
        assert np.array_equal(
            passed("16-bit", halves * np.float32(2.0**-80)), halves * np.float32(2.0**-80)
        )

    def test_8_bits_keep_the_largest_of_a_block_and_every_127th_of_it(self) -> None:
        steps = np.arange(-127, 128, dtype=np.float32)
        assert np.array_equal(passed("8-bit", steps), steps)

    @pytest.mark.parametrize("kind", FEWER)
    def test_a_block_has_its_own_scale(self, kind: Kind) -> None:
        vector = np.full(512, 1e-6, np.float32)
        vector[0] = 1e6
        assert passed(kind, vector)[256:] == pytest.approx(np.full(256, 1e-6), rel=1e-3)

    @given(kinds, vectors(most=300).filter(lambda vector: vector.size > 0))
    def test_rows_of_a_matrix_arrive_as_each_would_alone(
        self, kind: Kind, vector: Float32
    ) -> None:
        rows = np.stack([vector, 2 * vector, -vector])
        arrived = decode(kind, encode(kind, rows), vector.size, rows=3).reshape(rows.shape)
        assert np.array_equal(arrived, [passed(kind, row) for row in rows])
        assert len(encode(kind, rows)) == 3 * encoded_size(kind, vector.size)
        assert encode(kind, rows.T) == encode(kind, rows.T.copy())


class TestOnTheWire:
    @given(kinds, vectors(most=2000))
    def test_the_size_is_known_beforehand(self, kind: Kind, vector: Float32) -> None:
        assert len(encode(kind, vector)) == encoded_size(kind, vector.size)

    def test_sizes_by_hand(self) -> None:
        # 257 numbers are two blocks: two scales of four bytes besides the numbers.
        assert [encoded_size(kind, 257) for kind in KINDS] == [1028, 8 + 514, 8 + 257]
        assert [encoded_size(kind, 256) for kind in KINDS] == [1024, 4 + 512, 4 + 256]
        assert [encoded_size(kind, 0) for kind in KINDS] == [0, 0, 0]

    def test_bytes_by_hand(self) -> None:
        vector = np.array([1.0, -0.5], np.float32)
        assert encode("none", vector).hex() == "0000803f" + "000000bf"
        # 1 is 2^14 (0x7400) times 2^-14 (0x38800000), and -0.5 is -2^13 (0xf000) times it.
        assert encode("16-bit", vector).hex() == "00008038" + "0074" + "00f0"
        # The scale is 1; 127 of 127 parts (0x7f), and -63.5 of them, to the even one: -64
        # (0xc0).
        assert encode("8-bit", vector).hex() == "0000803f" + "7f" + "c0"

    @given(kinds, st.integers(0, 600), st.binary(max_size=1300))
    def test_a_message_of_another_size_is_refused(
        self, kind: Kind, count: int, data: bytes
    ) -> None:
        if len(data) != encoded_size(kind, count):
            with pytest.raises(
                PeerError,
                match=rf"{count} numbers \({kind}\) take {encoded_size(kind, count)} bytes",
            ):
                decode(kind, data, count)

    @pytest.mark.parametrize("kind", FEWER)
    @pytest.mark.parametrize("scale", [-1.0, -1e-45, np.nan, np.inf, -np.inf])
    def test_scales_that_are_negative_or_not_finite_are_refused(
        self, kind: Kind, scale: float
    ) -> None:
        good = encode(kind, np.ones(300, np.float32))
        bad = good[:4] + np.array([scale], "<f4").tobytes() + good[8:]  # the second block's
        with pytest.raises(PeerError, match="scale"):
            decode(kind, bad, 300)

    def test_a_scale_with_which_a_half_would_overflow_is_refused(self) -> None:
        half = np.array([65504], "<f2").tobytes()
        assert np.isfinite(
            decode("16-bit", np.array([2.0**112], "<f4").tobytes() + half, 1)
        ).all()
        with pytest.raises(PeerError, match="too large"):
            decode("16-bit", np.array([2.0**113], "<f4").tobytes() + half, 1)

    @given(st.sampled_from(FEWER), st.integers(0, 300), st.data())
    def test_any_bytes_of_the_right_size_are_numbers_or_refused(
        self, kind: Kind, count: int, data: st.DataObject
    ) -> None:
        size = encoded_size(kind, count)
        raw = np.random.default_rng(data.draw(st.integers(0, 2**32))).bytes(size)
        try:
            numbers = decode(kind, raw, count)
        except PeerError:
            return
        sent = np.frombuffer(
            raw[size - count * (2 if kind == "16-bit" else 1) :],
            "<f2" if kind == "16-bit" else "i1",
        )
        finite = np.isfinite(sent) if kind == "16-bit" else sent != -128
        assert np.isfinite(numbers).tolist() == finite.tolist()

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_arrives_is_in_memory_of_its_own(self, kind: Kind) -> None:
        buffer = bytearray(encode(kind, np.ones(300, np.float32)))
        arrived = decode(kind, memoryview(buffer), 300)
        buffer[:] = bytes(len(buffer))
        arrived += 1
        assert arrived.tolist() == [2.0] * 300


def sent(kind: Kind, differences: list[Float32]) -> list[Float32]:
    """What arrives of one vector's differences, one after the other."""
    arrived, lost = [], None
    for difference in differences:
        told, lost = with_feedback(kind, difference[None], lost)
        arrived.append(told.values[0])
    return arrived


class TestFeedback:
    @settings(deadline=None)
    @given(
        fewer,
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30),
        st.integers(-20, 20),
    )
    def test_what_is_lost_never_adds_up(
        self, kind: Kind, seeds: list[int], power: int
    ) -> None:
        """The sum of what arrived is the sum of what was meant but for the error of one
        message.
        """
        drawn = [np.random.default_rng(seed).normal(size=300) for seed in seeds]
        differences = [(10.0**power * each).astype(np.float32) for each in drawn]
        off = np.sum(sent(kind, differences), axis=0, dtype=np.float64) - np.sum(
            differences, axis=0, dtype=np.float64
        )
        most = np.max([largest_of_block(difference) for difference in differences], axis=0)
        one_message = most * {"16-bit": 2**-11, "8-bit": 1 / 254}[kind]
        roundings = len(seeds) * most * 2**-22
        assert (
            np.abs(off) <= 1.02 * one_message + roundings
        ).all()  # 1.02: the error is sent with it

    def test_without_feedback_it_does_add_up(self) -> None:
        """What the test above would see if the error were forgotten: 0.003 of 1 is lost
        every time.
        """
        difference = np.array([1.0, 0.003], np.float32)
        assert sum(passed("8-bit", difference)[1] for _ in range(1000)) == 0
        assert sum(
            float(each[1]) for each in sent("8-bit", [difference] * 1000)
        ) == pytest.approx(3.0, abs=1.02 / 254)

    @pytest.mark.parametrize("kind", FEWER)
    @pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
    def test_a_memory_that_is_not_finite_is_forgotten(self, kind: Kind, odd: float) -> None:
        difference = np.array([1.0, 0.3], np.float32)
        _, broken, after = sent(
            kind, [difference, np.array([odd, 0.3], np.float32), difference]
        )
        assert not np.isfinite(broken[0])
        assert np.array_equal(after, sent(kind, [difference])[0])

    @pytest.mark.parametrize("kind", FEWER)
    def test_what_arrives_of_a_row_does_not_depend_on_other_rows(self, kind: Kind) -> None:
        """Not even where one of them diverges."""
        rows = (
            np.random.default_rng(3).normal(size=(3, 5, 300)).astype(np.float32)
        )  # of three rounds
        rows[1, 4, 7] = np.inf
        lost = None
        for number, differences in enumerate(rows):
            told, lost = with_feedback(kind, differences, lost)
            for row in range(5):
                assert np.array_equal(
                    told.values[row], sent(kind, list(rows[:, row]))[number], equal_nan=True
                )

    def test_it_takes_matrices_but_always_of_the_same_shape(self) -> None:
        rows = np.array([[1.0, 0.3], [0.1, 0.7]], np.float32)
        _, lost = with_feedback("8-bit", rows, None)
        with pytest.raises(LocalError, match=r"changed from \(2, 2\) to \(1, 2\)"):
            with_feedback("8-bit", rows[:1], lost)


class TestBroadcastCompressor:
    @given(
        st.sampled_from(FEWER), vectors(1e-10, 1e10, most=300), st.integers(0, 2**32 - 1)
    )
    def test_a_receiver_comes_to_hold_it(self, kind: Kind, w: Float32, seed: int) -> None:
        before = w + np.random.default_rng(seed).normal(size=w.size).astype(np.float32)
        quantized = BroadcastCompressor(kind).quantize(w, before)
        assert (
            quantized.tobytes()
            == (before + decode(kind, encode(kind, w - before), w.size)).tobytes()
        )
        assert quantized.dtype == np.float32

    @pytest.mark.parametrize("kind", KINDS)
    def test_again_and_again_it_comes_to_w(self, kind: Kind) -> None:
        """Each time what is left is a 254th of what was, or less."""
        w = np.random.default_rng(5).normal(size=300).astype(np.float32)
        held = np.zeros(300, np.float32)
        for _ in range(5):
            held = BroadcastCompressor(kind).quantize(w, held)
        assert held == pytest.approx(w, abs=1e-6)

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_not_finite_stays_so(self, kind: Kind) -> None:
        w = np.array([np.nan, 1.0, np.inf], np.float32)
        held = BroadcastCompressor(kind).quantize(w, np.zeros(3, np.float32))
        assert np.isfinite(held).tolist() == [False, True, False]
