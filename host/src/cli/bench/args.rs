//! What can be written after `tokenrouter bench`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};

use crate::config::suggestion;
use crate::runner::cuda::Dtype;
use crate::runner::model_config::shapes::{self, Shape};

/// Measure speed: of a route under load, of whole steps, or of kernels
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").args(["config", "kernels", "steps"]).required(true),
    after_help = AFTER_HELP,
)]
pub struct Bench {
    /// Configuration file (TOML), for a load on one of its routes
    #[arg(requires_all = ["route", "requests", "output_len"])]
    pub config: Option<PathBuf>,
    /// Route or model that answers
    #[arg(long, value_name = "NAME", requires = "config")]
    pub route: Option<String>,
    /// Requests that are always under way; several numbers are measured one after the other
    #[arg(long, value_name = "N,…", value_delimiter = ',', requires = "config", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub requests: Vec<u32>,
    /// Tokens of each answer; end tokens do not end it
    #[arg(long, value_name = "L", requires = "config", value_parser = clap::value_parser!(u32).range(1..))]
    pub output_len: Option<u32>,
    /// Tokens of each prompt, drawn at random
    #[arg(long, value_name = "P", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub input_len: u32,
    /// Requests in all, for each N [default: 2 N]
    #[arg(long, value_name = "T", requires = "config", value_parser = clap::value_parser!(u32).range(1..))]
    pub total: Option<u32>,
    /// Prompts and draws of request i come from seed + i
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Write the steps of the last N as a trace for ui.perfetto.dev
    #[arg(long, value_name = "FILE", requires = "config")]
    pub timeline: Option<PathBuf>,
    /// Draw a second from the middle of the last N (SVG)
    #[arg(long, value_name = "FILE", requires = "config")]
    pub timeline_svg: Option<PathBuf>,
    /// Measure each kernel against what the device can do
    #[arg(long)]
    pub kernels: bool,
    /// Measure whole steps of models with random weights
    #[arg(long)]
    pub steps: bool,
    /// With --kernels and --steps: the CUDA device
    #[arg(long, value_name = "cuda:N", default_value = "cuda:0", value_parser = ordinal, conflicts_with = "config")]
    pub device: u32,
    /// With --kernels and --steps: shape of a model, as `shape` in a configuration; may be given several times
    /// [default: qwen3-0.6b, qwen3-8b and qwen3-32b]
    #[arg(long = "shape", value_name = "SHAPE", value_parser = shape, conflicts_with = "config")]
    pub shapes: Vec<&'static Shape>,
    /// With --steps: type of weights and K/V
    #[arg(long, value_enum, default_value_t = StepDtype::Bf16, conflicts_with_all = ["config", "kernels"])]
    pub dtype: StepDtype,
    /// With --kernels and --steps: tokens of each sequence before its rows; each number is measured
    /// [default: 1024; with --kernels also 8192]
    #[arg(long, value_name = "C,…", value_delimiter = ',', conflicts_with = "config", value_parser = clap::value_parser!(u32).range(1..))]
    pub context_len: Vec<u32>,
    /// With --steps: rows of a step, at most 64; with --kernels: rows, at most 2048, where more than 64 are
    /// of one prompt; each number is measured
    /// [default: 1,2,4,8,16,32; with --kernels 1,8,16,32,64,2048]
    #[arg(long, value_name = "R,…", value_delimiter = ',', conflicts_with = "config", value_parser = clap::value_parser!(u32).range(1..=2048))]
    pub rows: Vec<u32>,
    /// With --steps: measure also steps in which each sequence has K rows, the last one sampled
    #[arg(long, value_name = "K", conflicts_with_all = ["config", "kernels"], value_parser = clap::value_parser!(u32).range(2..=64))]
    pub extend: Option<u32>,
    /// With --steps: measure also a prompt of P tokens (bf16 only)
    #[arg(long, value_name = "P", conflicts_with_all = ["config", "kernels"], value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill: Option<u32>,
    /// With --kernels and --steps: operations per second that the device can do, for example 8e14, to give
    /// shares of it
    #[arg(long, value_name = "F", conflicts_with = "config", value_parser = operations)]
    pub flops: Option<f64>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Examples:
  tokenrouter bench config/demo.toml --route rstitch --requests 1,4 --output-len 64 --input-len 32
  tokenrouter bench config/bench-r2r.toml --route r2r-like --requests 1,2,4,8,16 \\
      --output-len 2048 --json out.json --timeline out.trace.json --timeline-svg out.svg
  tokenrouter bench --steps
  tokenrouter bench --steps --shape qwen3-32b --rows 1,8 --context-len 1024,8192 --extend 4
  tokenrouter bench --steps --shape qwen3-0.6b --rows 1 --prefill 8192 --json out.json
  tokenrouter bench --kernels --shape qwen3-8b --rows 8,2048

The load is closed: when a request ends the next begins, until T have ended. The models run in
this process, without HTTP and text. One short request warms up. What is measured, for each N:
  tokens/s  all tokens, by the time from the first submission to the last token
  decode    tokens/s without prefills and tail: from the moment when each of the first N
            requests has a token until the first of them ends
  TTFT      from the submission to the first token: median and 99th percentile of the requests
  TPOT      from a request's first token to its last, by the tokens after the first: the same
  handoffs  times that a request went from one model to another
and for each model:
  tokens    share of all tokens that it wrote
  steps     forwards; batch and rows are the requests and the rows of one, on average
  step      time of a forward as its thread sees it, the device's work and the wait for it:
            median and 99th percentile
  busy      share of the time in which a forward was under way
  gap       host time between steps: from the end of a forward to the start of the next, median
            and 90th percentile. Waits for work are left out: gaps of 1 ms and more, and those
            in which something came in, as another model's step ended or a request was
            submitted in them or in the 100 µs before

--steps and --kernels need a CUDA device and no files: weights and K/V are random. The bandwidth
of a copy (bytes read and written) and of reading is measured first. --steps times for each shape, context and R:
  each      rows of each sequence: 1 for decoding, K with --extend
  step      graph of a whole step, sampling and signals included, by the device's clock: median
  forward   the same with upload, download and the host's work, by the host's clock: median
  floor     time to read weights and K/V once at the bandwidth of a copy, and its share of step
  to C      step by the same step at the first context plus the time of the K/V read more
  to 1      step by that with as many rows of a sequence each
With --prefill: the whole prompt by the host's clock, then its linear layers and its attention
alone by the device's clock. --kernels times each kernel of a decoder: replays of graphs that
launch it once in each of up to 28 layers, so that what it reads comes from memory; GB/s are of
the bytes that it must read and write, each once";

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
        let bench = parse(&["c.toml", "--route", "r", "--requests", "1,8", "--output-len", "9"]).unwrap();
        assert_eq!((bench.requests, bench.output_len, bench.input_len, bench.total), (vec![1, 8], Some(9), 1024, None));
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
            (&[][..], "<CONFIG|--kernels|--steps>"),
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
        ] {
            let error = parse(more).unwrap_err();
            assert!(error.contains(message), "{more:?}: {error}");
        }
    }
}
