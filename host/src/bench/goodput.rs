//! Limits that make a request a good one.

use std::str::FromStr;

use super::ask::Times;

/// One limit, in ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    metric: Metric,
    ms: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Metric {
    Ttft,
    Tpot,
    E2e,
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (metric, ms) = text.split_once(':').ok_or("must be METRIC:MS, for example ttft:200")?;
        let metric = match metric {
            "ttft" => Metric::Ttft,
            "tpot" => Metric::Tpot,
            "e2e" | "e2el" => Metric::E2e,
            other => return Err(format!("{other:?} is no metric; use ttft, tpot or e2e")),
        };
        let ms = ms.parse().ok().filter(|ms: &f64| ms.is_finite() && *ms > 0.0);
        Ok(Self { metric, ms: ms.ok_or("the limit must be a number of ms above 0")? })
    }
}

/// Whether all limits hold. An answer of one token has no time per token to exceed.
pub fn is_good(times: &Times, limits: &[Limit]) -> bool {
    limits.iter().all(|limit| {
        let time = match limit.metric {
            Metric::Ttft => times.ttft,
            Metric::Tpot => times.tpot.unwrap_or(0.0),
            // One that was broken off is within no limit of its end.
            Metric::E2e => times.e2e.unwrap_or(f64::INFINITY),
        };
        time <= limit.ms
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(text: &str) -> Vec<Limit> {
        text.split(' ').map(|limit| limit.parse().unwrap()).collect()
    }

    #[test]
    fn all_limits_must_hold() {
        let times = Times { ttft: 200.0, tpot: Some(50.0), e2e: Some(1000.0) };
        for (text, good) in [
            ("ttft:200", true),
            ("ttft:199.9", false),
            ("ttft:200 tpot:50 e2e:1000", true),
            ("ttft:200 tpot:49", false),
            ("e2el:999", false),
        ] {
            assert_eq!(is_good(&times, &limits(text)), good, "{text}");
        }
        assert!(is_good(&Times { tpot: None, ..times }, &limits("tpot:1")));
        assert!(is_good(&times, &[]) && !is_good(&Times { e2e: None, ..times }, &limits("e2e:9999")));
    }

    #[test]
    fn refusals() {
        for text in ["ttft", "itl:3", "ttft:", "ttft:0", "ttft:nan", "ttft:inf", "ttft:-1"] {
            assert!(text.parse::<Limit>().is_err(), "{text}");
        }
    }
}
