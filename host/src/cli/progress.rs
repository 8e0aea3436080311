//! How far loading is: bars on a terminal, one log line a model elsewhere.

use std::io::IsTerminal;
use std::time::Instant;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress of loading all models.
pub struct Progress(MultiProgress);

/// Progress of one model.
pub struct ModelProgress {
    name: String,
    start: Instant,
    bar: ProgressBar,
}

impl Progress {
    /// Bars on standard error if it is a terminal.
    pub fn stderr() -> Self {
        let hidden = !std::io::stderr().is_terminal();
        Self(MultiProgress::with_draw_target(if hidden {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        }))
    }

    /// A bar for the model `name`.
    pub fn model(&self, name: &str) -> ModelProgress {
        // Without a length the bar is empty, not full.
        let bar = self.0.add(ProgressBar::no_length());
        let style = ProgressStyle::with_template("loading {msg}  {bar:30}  {bytes} of {total_bytes}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.set_message(name.to_owned());
        ModelProgress { name: name.into(), start: Instant::now(), bar }
    }
}

impl ModelProgress {
    /// So many bytes of so many.
    pub fn advance(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    /// Loading has ended, well or not.
    pub fn finish(&self) {
        let (bytes, seconds) = (self.bar.position(), self.start.elapsed().as_secs_f64());
        self.bar.finish_and_clear();
        // A log line among bars would leave pieces of them on the screen.
        if self.bar.is_hidden() {
            let mib = bytes as f64 / f64::from(1 << 20);
            tracing::info!(model = self.name, "read {mib:.1} MiB of weights in {seconds:.2} s");
        }
    }
}
