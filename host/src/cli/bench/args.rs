//! What can be written after `tokenrouter bench`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};

use super::help::AFTER_HELP;
use super::load_args::LoadArgs;
use crate::plain::suggestion;
use crate::runner::cuda::Dtype;
use crate::runner::model_config::shapes::{self, Shape};

/// Measure speed: of a route under load, of whole steps, or of kernels
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").args(["config", "url", "compare", "kernels", "steps"]).required(true),
    group = ArgGroup::new("alone").args(["kernels", "steps"]),
    group = ArgGroup::new("target").args(["config", "url", "compare"]),
    override_usage = "tokenrouter bench <CONFIG|--url <URL>|--compare <A> <B>|--kernels|--steps> [OPTIONS]",
    after_help = AFTER_HELP,
)]
pub struct Bench {
    #[command(flatten)]
    pub load: LoadArgs,
    /// Measure each kernel against what the device can do
    #[arg(long)]
    pub kernels: bool,
    /// Measure whole steps of models with random weights
    #[arg(long)]
    pub steps: bool,
    /// With --kernels and --steps: the CUDA device
    #[arg(long, value_name = "cuda:N", default_value = "cuda:0", value_parser = ordinal, conflicts_with = "target")]
    pub device: u32,
    /// With --kernels and --steps: shape of a model, as `shape` in a configuration; may be given several times
    /// [default: qwen3-0.6b, qwen3-8b and qwen3-32b]
    #[arg(long = "shape", value_name = "SHAPE", value_parser = shape, conflicts_with = "target")]
    pub shapes: Vec<&'static Shape>,
    /// With --steps: type of weights and K/V
    #[arg(long, value_enum, default_value_t = StepDtype::Bf16, conflicts_with_all = ["target", "kernels"])]
    pub dtype: StepDtype,
    /// With --kernels and --steps: tokens of each sequence before its rows; each number is measured
    /// [default: 1024; with --kernels also 8192]
    #[arg(long, value_name = "C,…", value_delimiter = ',', conflicts_with = "target", value_parser = clap::value_parser!(u32).range(1..))]
    pub context_len: Vec<u32>,
    /// With --steps: rows of a step, at most 64; with --kernels: rows, at most 2048, where more than 64 are
    /// of one prompt; each number is measured
    /// [default: 1,2,4,8,16,32; with --kernels 1,8,16,32,64,2048]
    #[arg(long, value_name = "R,…", value_delimiter = ',', conflicts_with = "target", value_parser = clap::value_parser!(u32).range(1..=2048))]
    pub rows: Vec<u32>,
    /// With --steps: measure also steps in which each sequence has K rows, the last one sampled
    #[arg(long, value_name = "K", conflicts_with_all = ["target", "kernels"], value_parser = clap::value_parser!(u32).range(2..=64))]
    pub extend: Option<u32>,
    /// With --steps: measure also a prompt of P tokens (bf16 only)
    #[arg(long, value_name = "P", conflicts_with_all = ["target", "kernels"], value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill: Option<u32>,
    /// With --kernels and --steps: operations per second that the device can do, for example 8e14, to give
    /// shares of it
    #[arg(long, value_name = "F", conflicts_with = "target", value_parser = operations)]
    pub flops: Option<f64>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Type of weights and K/V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StepDtype {
    Bf16,
    F32,
}

impl From<StepDtype> for Dtype {
    fn from(dtype: StepDtype) -> Self {
        match dtype {
            StepDtype::Bf16 => Self::Bf16,
            StepDtype::F32 => Self::F32,
        }
    }
}

fn ordinal(text: &str) -> Result<u32, String> {
    let number = if text == "cuda" { Some("0") } else { text.strip_prefix("cuda:") };
    number.and_then(|n| n.parse().ok()).ok_or_else(|| "must be cuda:N with the number of the device".into())
}

fn operations(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "must be a number above 0, for example 8e14".into())
}

fn shape(text: &str) -> Result<&'static Shape, String> {
    shapes::find(text).ok_or_else(|| suggestion(text, shapes::SHAPES.iter().map(|shape| shape.name)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::super::args::{Arguments, Command};
    use super::*;

    fn parse(more: &[&str]) -> Result<Bench, String> {
        let all = ["tokenrouter", "bench"].iter().chain(more);
        match Arguments::try_parse_from(all).map_err(|e| e.to_string())?.command {
            Command::Bench(bench) => Ok(*bench),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn loads_and_devices() {
        let load = parse(&["c.toml", "--route", "r", "--requests", "1,8", "--output-len", "9"]).unwrap().load;
        assert_eq!((load.requests, load.output_len.map(|length| length.to_string())), (vec![1, 8], Some("9".into())));
        assert_eq!((load.input_len.to_string().as_str(), load.total, load.warm_up), ("1024", None, 1));
        let open = ["--url", "http://h", "--rate", "2.5,inf", "--goodput", "ttft:200", "tpot:50", "--input-len", "9:2"];
        let load = parse(&open).unwrap().load;
        assert_eq!((load.rate, load.goodput.len(), load.burstiness), (vec![2.5, f64::INFINITY], 2, 1.0));
        let bench = parse(&["--steps", "--shape", "qwen3-32b", "--device", "cuda:3", "--dtype", "f32"]).unwrap();
        assert_eq!((bench.shapes[0].name, bench.device, bench.rows.len()), ("qwen3-32b", 3, 0));
        assert_eq!(Dtype::from(bench.dtype), Dtype::F32);
        let bench = parse(&["--steps", "--rows", "1,64", "--context-len", "1024,8192", "--extend", "4"]).unwrap();
        assert_eq!((bench.rows, bench.context_len, bench.extend), (vec![1, 64], vec![1024, 8192], Some(4)));
        let bench = parse(&["--steps", "--prefill", "8192", "--flops", "8e14"]).unwrap();
        assert_eq!((bench.prefill, bench.flops), (Some(8192), Some(8e14)));
        let bench = parse(&["--kernels", "--shape", "qwen3-8b", "--rows", "2048", "--json", "x"]).unwrap();
        assert!(bench.kernels && bench.shapes.len() == 1 && bench.rows == [2048] && bench.json.is_some());
    }

    #[test]
    fn refusals() {
        for (more, message) in [
            (&[][..], "<CONFIG|--url <URL>|--compare <A> <B>|--kernels|--steps>"),
            (&["c.toml"], "--route"),
            (&["c.toml", "--kernels"], "cannot be used with"),
            (&["--kernels", "--steps"], "cannot be used with"),
            (&["--kernels", "--device", "cpu"], "must be cuda:N"),
            (&["--kernels", "--extend", "4"], "cannot be used with"),
            (&["--kernels", "--dtype", "f32"], "cannot be used with"),
            (&["--kernels", "--rows", "4096"], "4096 is not in 1..=2048"),
            (&["--steps", "--extend", "1"], "1 is not in 2..=64"),
            (&["--steps", "--flops", "0"], "must be a number above 0"),
            (&["--steps", "--shape", "qwen3-33b"], "did you mean `qwen3-32b`?"),
            (&["c.toml", "--shape", "qwen3-32b"], "cannot be used with"),
            (&["c.toml", "--route", "r", "--requests", "0", "--output-len", "1"], "0 is not in 1.."),
            (&["c.toml", "--route", "r"], "--requests"),
            (&["c.toml", "--route", "r", "--requests", "1", "--rate", "1"], "cannot be used with"),
            (&["c.toml", "--route", "r", "--requests", "1", "--burstiness", "2"], "cannot be used with"),
            (&["c.toml", "--route", "r", "--rate", "0"], "must be from 0.001"),
            (&["c.toml", "--url", "http://h", "--requests", "1"], "cannot be used with"),
            (&["--url", "http://h", "--requests", "1", "--timeline", "x"], "cannot be used with"),
            (&["--url", "http://h", "--requests", "1", "--goodput", "ttft"], "must be METRIC:MS"),
            (&["--url", "http://h", "--requests", "1", "--input-len", "5:5"], "SPREAD below L"),
            (&["--compare", "a", "b", "--requests", "1"], "--route"),
            (&["--compare", "a", "--route", "r", "--requests", "1"], "2 values required"),
            (&["--url", "http://h", "--requests", "1", "--rounds", "2"], "cannot be used with"),
            (&["c.toml", "--route", "r", "--requests", "1", "--ablation", "--plot", "x"], "cannot be used with"),
            (&["c.toml", "--route", "r", "--requests", "1", "--vocab-size", "2"], "cannot be used with"),
            (&["--kernels", "--requests", "1"], "cannot be used with"),
            (&["--url", "http://h", "--requests", "1", "--model"], "a value is required"),
            (&["--url", "http://h", "--requests", "1", "--mode", "routed"], "cannot be used with"),
            (&["--steps", "--input-len", "5"], "cannot be used with"),
            (&["c.toml", "--route", "r", "--requests", "1", "--max-seconds", "0"], "must be seconds, from 0.1"),
            (&["c.toml", "--route", "r", "--requests", "1", "--turns", "0"], "0 is not in 1..=1000"),
            (&["c.toml", "--route", "r", "--requests", "1", "--prefixes", "0"], "0 is not in 1.."),
            (&["c.toml", "--route", "r", "--rate", "1", "--sweep", "m"], "cannot be used with"),
            (
                &["c.toml", "--route", "r", "--requests", "1", "--sweep", "m", "--prefix-len", "8", "--prefixes", "2"],
                "cannot be used with",
            ),
            (&["c.toml", "--route", "r", "--requests", "1", "--sweep", "m", "--ablation"], "cannot be used with"),
        ] {
            let error = parse(more).unwrap_err();
            assert!(error.contains(message), "{more:?}: {error}");
            // The usage once, and where nothing was said what is measured the group as well.
            let groups = error.matches("<CONFIG|").count();
            assert_eq!(groups, if more.is_empty() { 2 } else { error.matches("Usage:").count() }, "{error}");
            assert!(!error.contains("<CONFIG|--url <URL>|--compare <A> <B>>"), "{error}");
        }
    }
}
