//! Rotary positions: what config.json says of them.

use serde::Deserialize;

use super::Raw;

/// Bound of the numbers that scale rotary frequencies.
const LARGEST_SCALING: f64 = 1e9;

/// How rotary frequencies are changed for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, those between blended.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: f64,
    },
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct RawRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
}

impl RopeScaling {
    pub(super) fn apply(self, frequency: f64) -> f64 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let turns = original_context * frequency / std::f64::consts::TAU;
                if turns < low_freq_factor {
                    frequency / factor
                } else if turns > high_freq_factor {
                    frequency
                } else {
                    let blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - blend) * frequency / factor + blend * frequency
                }
            }
        }
    }
}

/// Old files keep the base beside an optional `rope_scaling`, new ones put all into `rope_parameters`.
pub(super) fn rope(raw: &Raw) -> Result<(f64, RopeScaling), String> {
    let (key, rope) = match (&raw.rope_parameters, &raw.rope_scaling) {
        (Some(rope), _) => ("rope_parameters", Some(rope)),
        (None, rope) => ("rope_scaling", rope.as_ref()),
    };
    let theta = rope.and_then(|r| r.rope_theta).or(raw.rope_theta).unwrap_or(10_000.0);
    if !(1.0..=1e12).contains(&theta) {
        let place = if rope.is_some_and(|r| r.rope_theta.is_some()) { format!("{key}.") } else { String::new() };
        return Err(format!("{place}rope_theta is {theta:?}; it must be from 1 to 1e12; download the file again"));
    }
    let partial = rope.and_then(|r| r.partial_rotary_factor).or(raw.partial_rotary_factor).unwrap_or(1.0);
    if partial != 1.0 {
        return Err(format!("partial_rotary_factor {partial} is not supported; models that rotate whole heads are"));
    }
    let Some(rope) = rope else { return Ok((theta, RopeScaling::None)) };
    let number = |name: &str, value: Option<f64>, least: f64| match value {
        Some(v) if (least..=LARGEST_SCALING).contains(&v) => Ok(v),
        Some(v) => Err(format!(
            "{key}.{name} is {v:?}; it must be from {least:?} to {LARGEST_SCALING:?}; download the file again"
        )),
        None => Err(format!("{key}.{name} is missing; download config.json again")),
    };
    let scaling = match rope.rope_type.as_deref().unwrap_or("default") {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: number("factor", rope.factor, 1.0)? },
        "llama3" => {
            let factor = number("factor", rope.factor, 1.0)?;
            let low_freq_factor = number("low_freq_factor", rope.low_freq_factor, 1e-3)?;
            let high_freq_factor = number("high_freq_factor", rope.high_freq_factor, 1e-3)?;
            if high_freq_factor <= low_freq_factor {
                return Err(format!(
                    "{key}.high_freq_factor is {high_freq_factor:?}; it must be above low_freq_factor {low_freq_factor:?}; download the file again"
                ));
            }
            let context = rope.original_max_position_embeddings;
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context: number("original_max_position_embeddings", context, 1.0)?,
            }
        }
        other => {
            return Err(format!(
                "{key} of type `{other}` is not supported; `default`, `linear` and `llama3` are, so remove the entry to run the model at its trained context"
            ));
        }
    };
    Ok((theta, scaling))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_scaling_divides_all_frequencies() {
        assert_eq!(RopeScaling::Linear { factor: 4.0 }.apply(1.0), 0.25);
        assert_eq!(RopeScaling::None.apply(0.5), 0.5);
    }

    #[test]
    fn llama3_scaling_keeps_the_fast_and_divides_the_slow() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        assert_eq!(scaling.apply(1.0), 1.0);
        assert_eq!(scaling.apply(1e-5), 1e-5 / 8.0);
        // Where the context has 2.5 turns, halfway between the two.
        let middle = 2.5 * std::f64::consts::TAU / 8192.0;
        assert!((scaling.apply(middle) - middle * (0.5 / 8.0 + 0.5)).abs() < 1e-12);
    }
}
