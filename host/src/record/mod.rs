//! Recording: what the training of a router needs, written while requests run. `docs/recording.md`
//! describes the files.
//!
//! Models' threads fill small batches of rows and hand them to the writer's thread over a bounded
//! channel; where that is full, rows are dropped and counted, and nobody waits.

mod budget;
mod columns;
mod directory;
mod manifest;
mod recorder;
mod requests;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use columns::Shape;
pub use directory::inspect;
pub use manifest::{
    FORMAT as RECORDING_FORMAT, Manifest, Member, Plugin, RequestLine, Route, Settings, VERSION as RECORDING_VERSION,
};
use recorder::Recorder;
use writer::Writer;

use crate::runner::ModelInfo;
use crate::subserver::observe::Observer;

/// Batches and ended requests that wait for the writer.
const CHANNEL: usize = 64;
/// How long the end of a recording waits for the disk.
const FINISH_TIMEOUT: Duration = Duration::from_secs(30);

/// A recording to make.
pub struct Setup {
    pub directory: PathBuf,
    pub settings: Settings,
    /// By model.
    pub models: Vec<ModelInfo>,
    /// By route of the engine, bare models included.
    pub routes: Vec<Route>,
    /// Longest time that rows and lines are kept in memory only.
    pub kept_in_memory: Duration,
}

/// Why there is no recording.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Earlier runs have used up what the directory may hold.
    #[error(
        "{} holds {used} bytes of earlier runs and record.max_bytes is {max}; remove some, or raise it", directory.display()
    )]
    Full { directory: PathBuf, used: u64, max: u64 },
    #[error("{0}")]
    Directory(String),
}

/// A recording under way. Dropping it writes what is left and ends it.
pub struct Recording {
    recorder: Arc<Recorder>,
    run: PathBuf,
    thread: Option<JoinHandle<()>>,
    /// Closed when the writer has ended.
    done: Receiver<()>,
}

impl Recording {
    /// Make the directory of a new run, and the thread that writes it.
    pub fn start(setup: Setup) -> Result<Self, StartError> {
        let claimed = directory::claim(&setup.directory).map_err(StartError::Directory)?;
        let (contents, max) = (claimed.contents, setup.settings.max_bytes);
        let shape = |model: &ModelInfo| Shape {
            hidden: if setup.settings.hidden { model.hidden_size as usize } else { 0 },
            top_k: setup.settings.top_k.min(model.vocab_size) as usize,
        };
        let shapes: Vec<Shape> = setup.models.iter().map(shape).collect();
        let (to_writer, inbox) = bounded(CHANNEL);
        let manifest = describe(&setup, &shapes, contents.next_run);
        let recorder = Arc::new(Recorder::new(&manifest, &shapes, to_writer));
        let writer = Writer::create(claimed, manifest, shapes, recorder.status.clone());
        let Some(writer) = writer.map_err(StartError::Directory)? else {
            return Err(StartError::Full { directory: setup.directory, used: contents.bytes, max });
        };
        let run = writer.run_directory().clone();
        let (ending, done) = bounded::<()>(0);
        let body = move || {
            writer.work(&inbox, setup.kept_in_memory);
            drop(ending);
        };
        let thread = std::thread::Builder::new().name("recorder".into()).spawn(body);
        let thread =
            thread.map_err(|e| StartError::Directory(format!("the recorder's thread cannot be started: {e}")))?;
        Ok(Self { recorder, run, thread: Some(thread), done })
    }

    /// For the engine.
    pub fn observer(&self) -> Arc<dyn Observer> {
        self.recorder.clone()
    }

    /// Where this run is written.
    pub fn directory(&self) -> &PathBuf {
        &self.run
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let deadline = Instant::now() + FINISH_TIMEOUT;
        self.recorder.close(deadline);
        if self.done.recv_deadline(deadline) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the recording in {} could not be finished in time", self.run.display());
        } else if thread.join().is_err() {
            tracing::warn!("the recording in {} ended by a panic; see the log", self.run.display());
        }
    }
}

fn describe(setup: &Setup, shapes: &[Shape], run: u32) -> Manifest {
    let names: Vec<String> = setup.models.iter().map(|model| model.name.clone()).collect();
    let models = setup.models.iter().zip(manifest::file_prefixes(&names)).zip(shapes);
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Manifest {
        format: manifest::FORMAT.into(),
        version: manifest::VERSION,
        program: concat!("tokenrouter ", env!("CARGO_PKG_VERSION")).into(),
        run,
        started_unix_ms: since_1970.as_millis() as u64,
        settings: setup.settings.clone(),
        models: models
            .map(|((model, files), shape)| manifest::Model {
                name: model.name.clone(),
                files,
                description: model.description.clone(),
                hidden_size: model.hidden_size,
                vocab_size: model.vocab_size,
                top_k: shape.top_k as u32,
            })
            .collect(),
        routes: setup.routes.clone(),
        columns: Manifest::columns(&setup.settings),
        shards: Vec::new(),
        requests: Vec::new(),
        rows: 0,
        dropped_rows: 0,
        dropped_requests: 0,
        stopped: None,
    }
}

#[cfg(test)]
mod tests;
