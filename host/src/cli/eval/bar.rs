//! How far a point is: a bar on a terminal, nothing elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::eval::summary::Summary;

/// Progress of one point.
pub struct Bar(ProgressBar);

impl Bar {
    pub fn new(name: &str, questions: usize) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(questions as u64), target);
        if let Ok(style) = ProgressStyle::with_template("{prefix:!40}  {bar:20}  {pos}/{len}  {msg}") {
            bar.set_style(style);
        }
        bar.set_prefix(name.trim().to_owned());
        Self(bar)
    }

    /// `so_far`: all answers there are; `tokens` and `seconds`: of this run.
    pub fn show(&self, so_far: &Summary, tokens: u64, seconds: f64) {
        let share = match so_far.tokens_by_model.as_slice() {
            [_, .., (large, _)] => format!("{large} {:.1} %  ", 100.0 * so_far.large_share()),
            _ => String::new(),
        };
        let speed = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        self.0.set_message(format!("{share}{speed:.0} tokens/s"));
        self.0.set_position(so_far.questions as u64);
    }
}

impl Drop for Bar {
    /// Whatever follows is told on a clear line.
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
