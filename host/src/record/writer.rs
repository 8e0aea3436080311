//! The thread that writes a recording. Everything it holds in memory has its place on the disk already:
//! rows are taken only while their files and the manifest fit.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use sha2::{Digest, Sha256};

use super::budget::Budget;
use super::columns::{Columns, Shape};
use super::directory::{self, Claimed};
use super::manifest::{Manifest, RequestFile, RequestLine, Shard};
use crate::request::ModelId;

/// Memory for rows and lines that are not on disk yet; then a part is written, however few they are.
const PART_BYTES: usize = 64 << 20;
/// Most bytes of a shard's or a requests file's entry in the manifest.
const ENTRY_BYTES: u64 = 768;
/// Most bytes by which the manifest grows besides: counters with more digits, why it stopped.
const TAIL_BYTES: u64 = 2048;
/// Most characters of an error in the manifest.
const REASON_CHARS: usize = 200;

pub const MAX_BYTES: &str = "max_bytes";
pub const SHUTDOWN: &str = "shutdown";

/// What models' threads and the writer tell each other.
#[derive(Debug, Default)]
pub struct Status {
    stopped: AtomicBool,
    dropped_rows: AtomicU64,
    dropped_requests: AtomicU64,
}

impl Status {
    /// Nothing more is recorded. Once true it stays.
    pub fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
    pub fn drop_rows(&self, count: usize) {
        self.dropped_rows.fetch_add(count as u64, Ordering::Relaxed);
    }
    pub fn drop_request(&self) {
        self.dropped_requests.fetch_add(1, Ordering::Relaxed);
    }
    pub fn dropped_rows(&self) -> u64 {
        self.dropped_rows.load(Ordering::Relaxed)
    }
    pub fn dropped_requests(&self) -> u64 {
        self.dropped_requests.load(Ordering::Relaxed)
    }
}

/// What the writer is sent.
pub enum Message {
    Rows(ModelId, Columns),
    Request(Box<RequestLine>),
    /// Nothing follows.
    Finish,
}

pub struct Writer {
    /// Keeps other processes out.
    _claimed: Claimed,
    run: PathBuf,
    budget: Budget,
    manifest: Manifest,
    /// Of the manifest on disk.
    manifest_bytes: u64,
    shapes: Vec<Shape>,
    /// By model: rows that are not on disk yet. Empty once the disk has failed.
    pending: Vec<Columns>,
    lines: Vec<u8>,
    line_count: u64,
    /// Number of the next part: the shards and the requests file that are written together.
    part: u32,
    status: Arc<Status>,
    told_of_drops: bool,
}

impl Writer {
    /// Start the run that `manifest` describes. `None` when there is no room for it.
    pub fn create(
        claimed: Claimed,
        manifest: Manifest,
        shapes: Vec<Shape>,
        status: Arc<Status>,
    ) -> Result<Option<Self>, String> {
        let budget = Budget::new(manifest.settings.max_bytes, claimed.contents.bytes);
        let bytes = manifest.to_json()?.len() as u64;
        if !budget.fits(0, bytes + TAIL_BYTES) {
            return Ok(None);
        }
        let mut writer = Self {
            run: claimed.make_run()?,
            _claimed: claimed,
            budget,
            manifest,
            manifest_bytes: bytes,
            pending: shapes.iter().map(|&shape| Columns::new(shape, 0)).collect(),
            shapes,
            lines: Vec::new(),
            line_count: 0,
            part: 0,
            status,
            told_of_drops: false,
        };
        writer.write_manifest()?;
        Ok(Some(writer))
    }

    pub fn run_directory(&self) -> &PathBuf {
        &self.run
    }

    /// Write what `inbox` brings until it says so, or all senders are gone.
    pub fn work(mut self, inbox: &Receiver<Message>, kept_in_memory: Duration) {
        // When what is pending goes to the disk at the latest.
        let mut due: Option<Instant> = None;
        loop {
            let message = match due {
                Some(due) => inbox.recv_deadline(due),
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match message {
                Ok(Message::Rows(model, rows)) => self.rows(model, &rows),
                Ok(Message::Request(line)) => self.request(&line),
                Err(RecvTimeoutError::Timeout) => {
                    self.cut();
                    due = None;
                }
                Ok(Message::Finish) | Err(RecvTimeoutError::Disconnected) => break,
            }
            due = self.holds_something().then(|| due.unwrap_or_else(|| Instant::now() + kept_in_memory));
        }
        self.cut();
        if !self.status.stopped() {
            self.stop(SHUTDOWN);
        }
    }

    fn holds_something(&self) -> bool {
        self.line_count > 0 || self.pending.iter().any(|rows| rows.rows() > 0)
    }

    fn rows(&mut self, model: ModelId, more: &Columns) {
        let Some(pending) = self.pending.get(model.index()).filter(|_| !self.status.stopped()) else { return };
        if pending.rows() + more.rows() > self.manifest.settings.shard_rows as usize {
            self.cut();
            if self.status.stopped() {
                return self.status.drop_rows(more.rows());
            }
        }
        if !self.have_room(Some((model, more)), 0) {
            return self.stop_full();
        }
        self.pending[model.index()].append(more);
        let held = self.pending.iter().map(Columns::data_bytes).sum::<usize>() + self.lines.len();
        if held >= PART_BYTES || self.pending[model.index()].rows() >= self.manifest.settings.shard_rows as usize {
            self.cut();
        }
    }

    fn request(&mut self, line: &RequestLine) {
        if self.status.stopped() {
            return;
        }
        let Ok(mut line) = serde_json::to_vec(line) else { return self.status.drop_request() };
        line.push(b'\n');
        if !self.have_room(None, line.len() as u64) {
            return self.stop_full();
        }
        self.lines.append(&mut line);
        self.line_count += 1;
        if self.lines.len() >= PART_BYTES {
            self.cut();
        }
    }

    /// Whether all that is pending fits the disk, with more rows of a model and `line` bytes of requests.
    fn have_room(&self, more: Option<(ModelId, &Columns)>, line: u64) -> bool {
        let of = |index: usize| more.filter(|(model, _)| model.index() == index).map(|(_, rows)| rows);
        let shards: u64 = self.pending.iter().enumerate().map(|(index, rows)| rows.file_bound(of(index))).sum();
        let names = self.pending.iter().chain(more.map(|(_, rows)| rows)).flat_map(Columns::own_names);
        let unlisted = names.filter(|name| !self.manifest.has_column(name));
        let columns: u64 = unlisted.map(|name| 6 * name.len() as u64 + 256).sum();
        let entries = (self.pending.len() as u64 + 1) * ENTRY_BYTES;
        let manifest = self.manifest_bytes + entries + columns + TAIL_BYTES;
        self.budget.fits(shards + self.lines.len() as u64 + line, manifest)
    }

    fn stop_full(&mut self) {
        self.cut();
        if !self.status.stopped() {
            self.stop(MAX_BYTES);
        }
    }

    /// Write everything pending as the next part.
    fn cut(&mut self) {
        if let Err(error) = self.write_part() {
            let lost: usize = self.pending.iter().map(Columns::rows).sum();
            self.status.drop_rows(lost);
            (0..std::mem::take(&mut self.line_count)).for_each(|_| self.status.drop_request());
            self.pending.clear();
            self.lines.clear();
            self.stop(&error);
        }
    }

    fn write_part(&mut self) -> Result<(), String> {
        if !self.holds_something() {
            return Ok(());
        }
        let part = self.part;
        self.part += 1;
        for index in 0..self.pending.len() {
            let rows = &self.pending[index];
            if rows.rows() == 0 {
                continue;
            }
            let (count, bytes) = (rows.rows() as u64, rows.to_safetensors()?);
            self.manifest.add_own_columns(rows.own_names());
            let model = &self.manifest.models[index];
            let (name, file) = (model.name.clone(), format!("{}-{part:05}.safetensors", model.files));
            let sha256 = self.put(&file, &bytes)?;
            self.manifest.shards.push(Shard { file, model: name, rows: count, bytes: bytes.len() as u64, sha256 });
            self.manifest.rows += count;
            self.pending[index] = Columns::new(self.shapes[index], 0);
        }
        if self.line_count > 0 {
            let (file, lines) = (format!("requests-{part:05}.jsonl"), std::mem::take(&mut self.lines));
            let sha256 = self.put(&file, &lines)?;
            let (rows, bytes) = (std::mem::take(&mut self.line_count), lines.len() as u64);
            self.manifest.requests.push(RequestFile { file, rows, bytes, sha256 });
        }
        self.write_manifest()
    }

    /// Write a new file of the run, and give its digest. A file that could not be written whole is removed.
    fn put(&mut self, file: &str, bytes: &[u8]) -> Result<String, String> {
        let (path, size) = (self.run.join(file), bytes.len() as u64);
        if !self.budget.fits(size, self.manifest_bytes) {
            return Err(MAX_BYTES.into());
        }
        let written = directory::write(&path, bytes);
        if written.is_ok() || std::fs::remove_file(&path).is_err() {
            self.budget.spend(size);
        }
        written.map_err(|e| format!("{} cannot be written: {e}", path.display()))?;
        Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Replace the manifest in one step.
    fn write_manifest(&mut self) -> Result<(), String> {
        self.manifest.dropped_rows = self.status.dropped_rows();
        self.manifest.dropped_requests = self.status.dropped_requests();
        if self.manifest.dropped_rows + self.manifest.dropped_requests > 0 && !self.told_of_drops {
            self.told_of_drops = true;
            tracing::warn!("the disk is slower than the models: {} lacks some evaluations", self.run.display());
        }
        let text = self.manifest.to_json()?;
        let bytes = text.len() as u64;
        if !self.budget.fits(0, bytes) {
            return Err(MAX_BYTES.into());
        }
        let (path, new) = (self.run.join("manifest.json"), self.run.join("manifest.json.new"));
        let replaced = directory::write(&new, &text).and_then(|()| directory::replace(&new, &path));
        replaced.map_err(|e| format!("{} cannot be written: {e}", path.display()))?;
        self.manifest_bytes = bytes;
        Ok(())
    }

    /// Record nothing more.
    fn stop(&mut self, reason: &str) {
        self.status.stopped.store(true, Ordering::Release);
        self.manifest.stopped = Some(reason.chars().take(REASON_CHARS).collect());
        let run = self.run.display();
        match reason {
            SHUTDOWN => {}
            MAX_BYTES => {
                tracing::warn!("recording into {run} has reached record.max_bytes and stopped; serving goes on");
            }
            error => tracing::warn!("recording into {run} has stopped: {error}; serving goes on"),
        }
        if let Err(error) = self.write_manifest() {
            tracing::warn!("the manifest in {} lacks why the run stopped: {error}", self.run.display());
        }
    }
}
