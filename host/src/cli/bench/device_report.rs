//! The tables of `--kernels` and `--steps`. Pure.

use super::super::plan::table;
use crate::bench::kernels::ShapeKernels;
use crate::bench::steps::{PrefillTime, ShapeTimes};
use crate::runner::cuda::DeviceInfo;
use crate::runner::cuda::measure::Bandwidth;

/// What the device can do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ceilings {
    pub(super) bandwidth: Bandwidth,
    /// Operations per second, where given.
    pub(super) flops: Option<f64>,
}

impl Ceilings {
    fn of_flops(&self, flops: f64) -> String {
        self.flops.map_or("-".into(), |most| percent(flops / most))
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or("-".into(), |ratio| format!("{ratio:.3}"))
}

fn gb(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

fn tflops(operations: f64, ms: f64) -> f64 {
    operations / (ms / 1e3)
}

/// The device and its ceilings.
pub(super) fn heading(device: &DeviceInfo, ceilings: &Ceilings) -> String {
    let [copy, read] = [ceilings.bandwidth.copy, ceilings.bandwidth.read].map(|bytes| bytes / 1e12);
    let (name, ordinal) = (&device.name, device.ordinal);
    format!("{name} (cuda:{ordinal}): a copy moves {copy:.2} TB/s, read and written; reading alone {read:.2} TB/s\n")
}

/// A row for each kind of step.
pub(super) fn step_table(times: &ShapeTimes, ceilings: &Ceilings) -> String {
    let head = [
        "shape",
        "context",
        "rows",
        "each",
        "step ms",
        "forward ms",
        "weights GB",
        "K/V GB",
        "floor ms",
        "of step",
        "to C",
        "to 1",
    ];
    let mut rows = vec![head.map(String::from)];
    let bandwidth = ceilings.bandwidth.copy;
    for step in &times.steps {
        let floor = step.floor_ms(bandwidth);
        rows.push([
            times.shape.into(),
            step.context.to_string(),
            step.rows.to_string(),
            step.rows_each.to_string(),
            format!("{:.3}", step.step_ms),
            format!("{:.3}", step.forward_ms),
            gb(step.weight_bytes),
            gb(step.kv_bytes),
            format!("{floor:.3}"),
            percent(floor / step.step_ms),
            ratio(step.to_first_context(&times.steps, bandwidth)),
            ratio(step.to_single_rows(&times.steps)),
        ]);
    }
    table(&rows, 1)
}

/// A prompt and its parts.
pub(super) fn prefill_table(shape: &str, prefill: &PrefillTime, ceilings: &Ceilings) -> String {
    let head = ["shape", "prompt", "part", "ms", "tokens/s", "TFLOP/s", "of --flops"].map(String::from);
    let row = |part: &str, ms: f64, rate: String, operations: Option<f64>| {
        let flops = operations.map(|operations| tflops(operations, ms));
        [
            shape.into(),
            prefill.tokens.to_string(),
            part.into(),
            format!("{ms:.2}"),
            rate,
            flops.map_or("-".into(), |flops| format!("{:.1}", flops / 1e12)),
            flops.map_or("-".into(), |flops| ceilings.of_flops(flops)),
        ]
    };
    let rate = format!("{:.0}", f64::from(prefill.tokens) / (prefill.forward_ms / 1e3));
    let none = || "-".to_owned();
    let rest = prefill.forward_ms - prefill.linear_ms - prefill.attention_ms;
    let rows = [
        head,
        row(&format!("all, by {}", prefill.chunk), prefill.forward_ms, rate, None),
        row("linear", prefill.linear_ms, none(), Some(prefill.linear_flops)),
        row("attention", prefill.attention_ms, none(), Some(prefill.attention_flops)),
        row("rest", rest, none(), None),
    ];
    table(&rows, 1)
}

/// A row for each kernel and size.
pub(super) fn kernel_table(times: &ShapeKernels, ceilings: &Ceilings) -> String {
    let head = ["shape", "kernel", "context", "rows", "µs", "GB/s", "of copy", "TFLOP/s", "of --flops"];
    let mut rows = vec![head.map(String::from)];
    for kernel in &times.kernels {
        let seconds = kernel.microseconds / 1e6;
        let (bytes, flops) = (kernel.bytes as f64 / seconds, kernel.flops / seconds);
        let products = kernel.flops > 0.0;
        rows.push([
            times.shape.into(),
            kernel.kernel.into(),
            kernel.context.map_or("-".into(), |context| context.to_string()),
            kernel.rows.to_string(),
            format!("{:.2}", kernel.microseconds),
            format!("{:.0}", bytes / 1e9),
            percent(bytes / ceilings.bandwidth.copy),
            if products { format!("{:.1}", flops / 1e12) } else { "-".into() },
            if products { ceilings.of_flops(flops) } else { "-".into() },
        ]);
    }
    table(&rows, 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::kernels::KernelTime;
    use crate::bench::steps::StepTime;

    const CEILINGS: Ceilings = Ceilings { bandwidth: Bandwidth { copy: 4e12, read: 4.4e12 }, flops: Some(800e12) };

    #[test]
    fn steps_and_prompts() {
        let step = |context, rows_each, step_ms, kv_bytes| StepTime {
            context,
            rows: 8,
            rows_each,
            step_ms,
            forward_ms: step_ms + 0.05,
            weight_bytes: 2_000_000_000,
            kv_bytes,
        };
        let prefill = PrefillTime {
            tokens: 8192,
            chunk: 2048,
            forward_ms: 50.0,
            linear_ms: 20.0,
            linear_flops: 8e12,
            attention_ms: 25.0,
            attention_flops: 1e12,
        };
        let times = ShapeTimes {
            shape: "tiny",
            description: String::new(),
            steps: vec![step(1024, 1, 1.0, 0), step(1024, 4, 1.1, 0), step(8192, 1, 1.65, 2_000_000_000)],
            prefill: Some(prefill.clone()),
        };
        assert_eq!(
            step_table(&times, &CEILINGS),
            "\
shape  context  rows  each  step ms  forward ms  weights GB  K/V GB  floor ms  of step   to C   to 1
tiny      1024     8     1    1.000       1.050        2.00    0.00     0.500   50.0 %      -      -
tiny      1024     8     4    1.100       1.150        2.00    0.00     0.500   45.5 %      -  1.100
tiny      8192     8     1    1.650       1.700        2.00    2.00     1.000   60.6 %  1.100      -
"
        );
        assert_eq!(
            prefill_table("tiny", &prefill, &CEILINGS),
            "\
shape  prompt          part     ms  tokens/s  TFLOP/s  of --flops
tiny     8192  all, by 2048  50.00    163840        -           -
tiny     8192        linear  20.00         -    400.0      50.0 %
tiny     8192     attention  25.00         -     40.0       5.0 %
tiny     8192          rest   5.00         -        -           -
"
        );
    }

    #[test]
    fn kernels_and_the_device() {
        let kernel = |kernel, context, flops| KernelTime {
            kernel,
            rows: 8,
            context,
            microseconds: 10.0,
            bytes: 20_000_000,
            flops,
        };
        let kernels =
            vec![kernel("qkv", None, 4e8), kernel("attention", Some(1024), 4e8), kernel("sampling", None, 0.0)];
        let times = ShapeKernels { shape: "tiny", description: String::new(), kernels };
        let without = Ceilings { flops: None, ..CEILINGS };
        assert_eq!(
            kernel_table(&times, &without),
            "\
shape  kernel     context  rows     µs  GB/s  of copy  TFLOP/s  of --flops
tiny   qkv              -     8  10.00  2000   50.0 %     40.0           -
tiny   attention     1024     8  10.00  2000   50.0 %     40.0           -
tiny   sampling         -     8  10.00  2000   50.0 %        -           -
"
        );
        let device = DeviceInfo { ordinal: 1, name: "NVIDIA H200".into(), total: 0, free: 0 };
        assert_eq!(
            heading(&device, &CEILINGS),
            "NVIDIA H200 (cuda:1): a copy moves 4.00 TB/s, read and written; reading alone 4.40 TB/s\n"
        );
    }
}
