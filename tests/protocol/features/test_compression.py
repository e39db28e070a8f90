"""Vector compression: errors are bounded, and feedback keeps them from accumulating."""

from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedbudget.arrays import Float32, Float64
from fedbudget.protocol.features.compression import (
    BroadcastCompressor,
    decode,
    encode,
    encoded_size,
    with_feedback,
)
from fedbudget.protocol.messages import Kind, LocalError, PeerError

LARGEST = float(np.finfo(np.float32).max)
FEWER: tuple[Kind, ...] = ("16-bit", "8-bit")
KINDS: tuple[Kind, ...] = ("none", *FEWER)
kinds, fewer = st.sampled_from(KINDS), st.sampled_from(FEWER)


@st.composite
def vectors(
    draw: st.DrawFn, smallest: float = 1e-30, largest: float = 1e30, *, max_size: int = 600
) -> Float32:
    """Numbers of mixed magnitude with zeros, often longer than a block."""
    count, seed = draw(st.integers(0, max_size)), draw(st.integers(0, 2**32 - 1))
    low, high = sorted(
        draw(st.tuples(*[st.floats(np.log10(smallest), np.log10(largest))] * 2))
    )
    rng = np.random.default_rng(seed)
    magnitudes = 10.0 ** rng.uniform(low, high, count)
    vector: Float32 = (
        magnitudes * rng.choice([-1, 0, 1], count, p=[0.45, 0.1, 0.45])
    ).astype(np.float32)
    return vector


def round_trip(kind: Kind, vector: Float32) -> Float32:
    return decode(kind, encode(kind, vector), vector.size)


def largest_of_block(vector: Float32) -> Float64:
    """For each number, the largest magnitude in its block of 256."""
    magnitudes = np.abs(vector.astype(np.float64))
    return np.array(
        [magnitudes[i - i % 256 : i - i % 256 + 256].max() for i in range(len(vector))]
    )


def bound(kind: Kind, vector: Float32) -> Float64:
    """The largest error of each number, worked out by hand."""
    largest = largest_of_block(vector)
    if kind == "none":
        return np.zeros(len(vector))
    if kind == "8-bit":  # half of a 127th; and float32's own roundings
        return largest * (1 / 254 + 2**-21)
    # Half of the last of 11 bits; and for a number much smaller than the largest of its
    # block, half of 2^-24 with the largest between 2^14 and 2^15.
    return np.maximum(np.abs(vector.astype(np.float64)) * 2**-11, largest * 2**-39)


class TestRoundTrip:
    @given(kinds, vectors())
    def test_error_is_bounded(self, kind: Kind, vector: Float32) -> None:
        off = np.abs(round_trip(kind, vector).astype(np.float64) - vector)
        assert (off <= bound(kind, vector)).all()

    @given(kinds, st.floats(1, 9.99), st.integers(-30, 29))
    def test_any_magnitude_passes(self, kind: Kind, digits: float, power: int) -> None:
        number = np.float32(digits * 10.0**power)
        arrived = round_trip(kind, np.array([number, -number, 0]))
        assert arrived == pytest.approx([number, -number, 0], rel=2**-11, abs=0)

    @given(kinds, arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32)))
    @example("16-bit", np.array([LARGEST, -LARGEST], np.float32))
    @example("8-bit", np.array([LARGEST, -LARGEST], np.float32))
    @example("16-bit", np.array([1e-45, -1e-40], np.float32))
    @example("8-bit", np.array([1e-45, -1e-45], np.float32))
    def test_finiteness_is_kept(self, kind: Kind, vector: Float32) -> None:
        assert (
            np.isfinite(round_trip(kind, vector)).tolist() == np.isfinite(vector).tolist()
        )

    @given(
        st.sampled_from(FEWER),
        vectors(),
        st.sampled_from([np.inf, -np.inf, np.nan]),
        st.randoms(),
    )
    def test_nonfinite_numbers_spoil_no_others(
        self, kind: Kind, vector: Float32, odd: float, draw: Random
    ) -> None:
        positions = draw.sample(range(len(vector)), min(len(vector), 3))
        without, broken = vector.copy(), vector.copy()
        without[positions], broken[positions] = 0, odd
        arrived, others = (
            round_trip(kind, broken),
            np.delete(np.arange(len(vector)), positions),
        )
        assert not np.isfinite(arrived[positions]).any()
        assert np.array_equal(arrived[others], round_trip(kind, without)[others])

    @pytest.mark.parametrize("kind", KINDS)
    def test_largest_and_smallest_float32_pass(self, kind: Kind) -> None:
        ends = np.array([LARGEST, -LARGEST, LARGEST / 3], np.float32)
        assert round_trip(kind, ends) == pytest.approx(ends, rel=1 / 84)
        tiny = np.array([1e-45, -3e-42], np.float32)  # two subnormal numbers
        assert round_trip(kind, tiny) == pytest.approx(tiny, rel=2**-11, abs=3e-42 / 254)

    @pytest.mark.parametrize("kind", KINDS)
    def test_empty_and_zero_vectors(self, kind: Kind) -> None:
        assert encode(kind, np.zeros(0, np.float32)) == b""
        assert round_trip(kind, np.zeros(0, np.float32)).tolist() == []
        assert round_trip(kind, np.zeros(300, np.float32)).tolist() == [0.0] * 300

    def test_16_bits_keep_float16_exactly(self) -> None:
        """Scaling by a power of two changes nothing."""
        halves = (
            np.arange(0x0400, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
        )  # all normal ones
        assert np.array_equal(round_trip("16-bit", halves), halves)
        assert np.array_equal(
            round_trip("16-bit", halves * np.float32(2.0**-80)),
            halves * np.float32(2.0**-80),
        )

    def test_8_bits_keep_127ths_exactly(self) -> None:
        """The largest number of a block and multiples of its 127th part are exact."""
        steps = np.arange(-127, 128, dtype=np.float32)
        assert np.array_equal(round_trip("8-bit", steps), steps)

    @pytest.mark.parametrize("kind", FEWER)
    def test_blocks_have_separate_scales(self, kind: Kind) -> None:
        vector = np.full(512, 1e-6, np.float32)
        vector[0] = 1e6
        assert round_trip(kind, vector)[256:] == pytest.approx(np.full(256, 1e-6), rel=1e-3)

    @given(kinds, vectors(max_size=300).filter(lambda vector: vector.size > 0))
    def test_matrix_rows_are_independent(self, kind: Kind, vector: Float32) -> None:
        rows = np.stack([vector, 2 * vector, -vector])
        arrived = decode(kind, encode(kind, rows), vector.size, rows=3).reshape(rows.shape)
        assert np.array_equal(arrived, [round_trip(kind, row) for row in rows])
        assert len(encode(kind, rows)) == 3 * encoded_size(kind, vector.size)
        assert encode(kind, rows.T) == encode(kind, rows.T.copy())


class TestWireFormat:
    @given(kinds, vectors(max_size=2000))
    def test_size_is_predicted(self, kind: Kind, vector: Float32) -> None:
        assert len(encode(kind, vector)) == encoded_size(kind, vector.size)

    def test_sizes_by_hand(self) -> None:
        # 257 numbers are two blocks: two scales of four bytes in addition to the numbers.
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
    def test_wrong_size_is_refused(self, kind: Kind, count: int, data: bytes) -> None:
        if len(data) != encoded_size(kind, count):
            with pytest.raises(
                PeerError,
                match=rf"{count} numbers \({kind}\) take {encoded_size(kind, count)} bytes",
            ):
                decode(kind, data, count)

    @pytest.mark.parametrize("kind", FEWER)
    @pytest.mark.parametrize("scale", [-1.0, -1e-45, np.nan, np.inf, -np.inf])
    def test_invalid_scales_are_refused(self, kind: Kind, scale: float) -> None:
        good = encode(kind, np.ones(300, np.float32))
        bad = good[:4] + np.array([scale], "<f4").tobytes() + good[8:]  # the second block's
        with pytest.raises(PeerError, match="scale"):
            decode(kind, bad, 300)

    def test_overflowing_scale_is_refused(self) -> None:
        half = np.array([65504], "<f2").tobytes()
        assert np.isfinite(
            decode("16-bit", np.array([2.0**112], "<f4").tobytes() + half, 1)
        ).all()
        with pytest.raises(PeerError, match="too large"):
            decode("16-bit", np.array([2.0**113], "<f4").tobytes() + half, 1)

    @given(st.sampled_from(FEWER), st.integers(0, 300), st.data())
    def test_random_bytes_decode_or_fail(
        self, kind: Kind, count: int, data: st.DataObject
    ) -> None:
        size = encoded_size(kind, count)
        raw = np.random.default_rng(data.draw(st.integers(0, 2**32))).bytes(size)
        try:
            numbers = decode(kind, raw, count)
        except PeerError:
            return
        received = np.frombuffer(
            raw[size - count * (2 if kind == "16-bit" else 1) :],
            "<f2" if kind == "16-bit" else "i1",
        )
        finite = np.isfinite(received) if kind == "16-bit" else received != -128
        assert np.isfinite(numbers).tolist() == finite.tolist()

    @pytest.mark.parametrize("kind", KINDS)
    def test_decoded_numbers_own_their_memory(self, kind: Kind) -> None:
        buffer = bytearray(encode(kind, np.ones(300, np.float32)))
        arrived = decode(kind, memoryview(buffer), 300)
        buffer[:] = bytes(len(buffer))
        arrived += 1
        assert arrived.tolist() == [2.0] * 300


def received(kind: Kind, differences: list[Float32]) -> list[Float32]:
    """Differences of one vector as they arrive, with error feedback."""
    arrived, lost = [], None
    for difference in differences:
        compressed, lost = with_feedback(kind, difference[None], lost)
        arrived.append(compressed.values[0])
    return arrived


class TestFeedback:
    @settings(deadline=None)
    @given(
        fewer,
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30),
        st.integers(-20, 20),
    )
    def test_errors_do_not_accumulate(
        self, kind: Kind, seeds: list[int], power: int
    ) -> None:
        """The sum of received differences is off by the error of one message at most."""
        drawn = [np.random.default_rng(seed).normal(size=300) for seed in seeds]
        differences = [(10.0**power * each).astype(np.float32) for each in drawn]
        off = np.sum(received(kind, differences), axis=0, dtype=np.float64) - np.sum(
            differences, axis=0, dtype=np.float64
        )
        largest = np.max(
            [largest_of_block(difference) for difference in differences], axis=0
        )
        one_message = largest * {"16-bit": 2**-11, "8-bit": 1 / 254}[kind]
        roundings = len(seeds) * largest * 2**-22
        assert (
            np.abs(off) <= 1.02 * one_message + roundings
        ).all()  # 1.02: the next message includes the error

    def test_errors_accumulate_without_feedback(self) -> None:
        """Control experiment: 0.003 next to 1 is lost every time without feedback."""
        difference = np.array([1.0, 0.003], np.float32)
        assert sum(round_trip("8-bit", difference)[1] for _ in range(1000)) == 0
        assert sum(
            float(each[1]) for each in received("8-bit", [difference] * 1000)
        ) == pytest.approx(3.0, abs=1.02 / 254)

    @pytest.mark.parametrize("kind", FEWER)
    @pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
    def test_nonfinite_memory_is_reset(self, kind: Kind, odd: float) -> None:
        difference = np.array([1.0, 0.3], np.float32)
        _, broken, after = received(
            kind, [difference, np.array([odd, 0.3], np.float32), difference]
        )
        assert not np.isfinite(broken[0])
        assert np.array_equal(after, received(kind, [difference])[0])

    @pytest.mark.parametrize("kind", FEWER)
    def test_feedback_rows_are_independent(self, kind: Kind) -> None:
        """Even if another row diverges."""
        rows = (
            np.random.default_rng(3).normal(size=(3, 5, 300)).astype(np.float32)
        )  # three rounds
        rows[1, 4, 7] = np.inf
        lost = None
        for number, differences in enumerate(rows):
            compressed, lost = with_feedback(kind, differences, lost)
            for row in range(5):
                assert np.array_equal(
                    compressed.values[row],
                    received(kind, list(rows[:, row]))[number],
                    equal_nan=True,
                )

    def test_shape_must_not_change(self) -> None:
        rows = np.array([[1.0, 0.3], [0.1, 0.7]], np.float32)
        _, lost = with_feedback("8-bit", rows, None)
        with pytest.raises(LocalError, match=r"changed from \(2, 2\) to \(1, 2\)"):
            with_feedback("8-bit", rows[:1], lost)


class TestBroadcastCompressor:
    @given(
        st.sampled_from(FEWER),
        vectors(1e-10, 1e10, max_size=300),
        st.integers(0, 2**32 - 1),
    )
    def test_quantize_matches_the_receiver(self, kind: Kind, w: Float32, seed: int) -> None:
        before = w + np.random.default_rng(seed).normal(size=w.size).astype(np.float32)
        quantized = BroadcastCompressor(kind).quantize(w, before)
        assert (
            quantized.tobytes()
            == (before + decode(kind, encode(kind, w - before), w.size)).tobytes()
        )
        assert quantized.dtype == np.float32

    @pytest.mark.parametrize("kind", KINDS)
    def test_repeated_quantization_converges(self, kind: Kind) -> None:
        """Each step leaves at most a 254th of the error."""
        w = np.random.default_rng(5).normal(size=300).astype(np.float32)
        held = np.zeros(300, np.float32)
        for _ in range(5):
            held = BroadcastCompressor(kind).quantize(w, held)
        assert held == pytest.approx(w, abs=1e-6)

    @pytest.mark.parametrize("kind", KINDS)
    def test_nonfinite_numbers_stay(self, kind: Kind) -> None:
        w = np.array([np.nan, 1.0, np.inf], np.float32)
        held = BroadcastCompressor(kind).quantize(w, np.zeros(3, np.float32))
        assert np.isfinite(held).tolist() == [False, True, False]
