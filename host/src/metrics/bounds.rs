//! Upper bounds of histograms: those of vLLM, so that its dashboards read them, with some below 10 ms, where the steps
//! of small models are.

/// Microseconds as nanoseconds.
const fn micros<const N: usize>(mut times: [u64; N]) -> [u64; N] {
    let mut i = 0;
    while i < N {
        times[i] *= 1_000;
        i += 1;
    }
    times
}

/// To the first token.
pub static FIRST_TOKEN: [u64; 24] = micros([
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    40_000,
    60_000,
    80_000,
    100_000,
    250_000,
    500_000,
    750_000,
    1_000_000,
    2_500_000,
    5_000_000,
    7_500_000,
    10_000_000,
    20_000_000,
    40_000_000,
    80_000_000,
    160_000_000,
    640_000_000,
    2_560_000_000,
]);

/// Between tokens.
pub static BETWEEN: [u64; 23] = micros([
    500, 1_000, 2_000, 5_000, 10_000, 25_000, 50_000, 75_000, 100_000, 150_000, 200_000, 300_000, 400_000, 500_000,
    750_000, 1_000_000, 2_500_000, 5_000_000, 7_500_000, 10_000_000, 20_000_000, 40_000_000, 80_000_000,
]);

/// Of whole requests and their parts.
pub static REQUEST: [u64; 27] = micros([
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    50_000,
    100_000,
    300_000,
    500_000,
    800_000,
    1_000_000,
    1_500_000,
    2_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    15_000_000,
    20_000_000,
    30_000_000,
    40_000_000,
    50_000_000,
    60_000_000,
    120_000_000,
    240_000_000,
    480_000_000,
    960_000_000,
    1_920_000_000,
]);

/// Of steps, and of waits between them.
pub static STEP: [u64; 16] = micros([
    10, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 5_000_000,
]);

/// Tokens of prompts and answers.
pub static TOKENS: [u64; 17] =
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000];

/// Rows of a step.
pub static ROWS: [u64; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384];

/// Requests of a step.
pub static BATCH: [u64; 14] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256];

/// Tokens in a row from one model.
pub static VISIT: [u64; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 512];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_ascend() {
        let all: [&[u64]; 8] = [&FIRST_TOKEN, &BETWEEN, &REQUEST, &STEP, &TOKENS, &ROWS, &BATCH, &VISIT];
        for bounds in all {
            assert!(bounds.is_sorted_by(|a, b| a < b), "{bounds:?}");
        }
        assert_eq!((FIRST_TOKEN[0], BETWEEN[4]), (500_000, 10_000_000));
    }
}
