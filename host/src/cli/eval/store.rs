//! Answers as they come, in memory and, where there is an output, in a file beside it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::super::output::Failure;
use crate::eval::resume;
use crate::eval::summary::{Point, Row};

/// All answers of an evaluation.
pub struct Store {
    /// By point and question.
    rows: HashMap<(String, usize), Row>,
    partial: Option<Partial>,
}

struct Partial {
    path: PathBuf,
    file: File,
}

/// Where the answers of an evaluation with this `--output` are kept until it is complete.
pub fn partial(output: &Path) -> PathBuf {
    let mut path = output.as_os_str().to_owned();
    path.push(".partial.jsonl");
    PathBuf::from(path)
}

impl Store {
    /// Take over what an evaluation with the same `digest` has left at `output`; with `restart`, drop it.
    pub fn open(output: Option<&Path>, digest: &str, restart: bool) -> Result<Self, Failure> {
        let Some(output) = output else { return Ok(Self { rows: HashMap::new(), partial: None }) };
        let path = partial(output);
        let fault = |e: std::io::Error| Failure::input(format!("--output: {}: {e}", path.display()));
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(fault)?;
        file.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => {
                Failure::input(format!("--output: {} is being written by another evaluation", path.display()))
            }
            TryLockError::Error(e) => Failure::input(format!("--output: {} cannot be locked: {e}", path.display())),
        })?;
        if restart {
            file.set_len(0).map_err(fault)?;
        }
        let bytes = std::fs::read(&path).map_err(fault)?;
        let kept = resume::read(&bytes, digest, &path.display().to_string()).map_err(Failure::input)?;
        file.set_len(kept.bytes as u64).map_err(fault)?;
        let mut partial = Partial { path, file };
        if kept.bytes == 0 {
            partial.append(resume::header(digest))?;
        }
        let rows = kept.rows.into_iter().map(|row| ((row.point.clone(), row.index), row)).collect();
        Ok(Self { rows, partial: Some(partial) })
    }

    /// Where answers are kept until all are there.
    pub fn path(&self) -> Option<&Path> {
        self.partial.as_ref().map(|partial| partial.path.as_path())
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn has(&self, point: &Point, index: usize) -> bool {
        self.rows.contains_key(&(point.name.clone(), index))
    }

    /// Keep an answer.
    pub fn add(&mut self, row: Row) -> Result<(), Failure> {
        if let Some(partial) = &mut self.partial {
            partial.append(resume::row(&row))?;
        }
        self.rows.insert((row.point.clone(), row.index), row);
        Ok(())
    }

    /// The answers of a point, by question.
    pub fn rows(&self, point: &Point) -> Vec<Row> {
        let mut rows: Vec<Row> = self.rows.values().filter(|row| row.point == point.name).cloned().collect();
        rows.sort_by_key(|row| row.index);
        rows
    }

    /// The results are written: the file is not needed any more.
    pub fn remove(self) -> Result<(), Failure> {
        let Some(partial) = self.partial else { return Ok(()) };
        match std::fs::remove_file(&partial.path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                Err(Failure::work(format!("{} cannot be removed: {e}", partial.path.display())))
            }
            _ => Ok(()),
        }
    }
}

impl Partial {
    /// One write a line, so that at most the last line is torn.
    fn append(&mut self, line: serde_json::Result<String>) -> Result<(), Failure> {
        let line = line.map_err(Failure::work)?;
        self.file
            .write_all(line.as_bytes())
            .map_err(|e| Failure::work(format!("{} cannot be written: {e}", self.path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("o.json");
        let open = || Store::open(Some(&output), "digest", false).map(|store| store.len());
        let first = Store::open(Some(&output), "digest", false).unwrap();
        let second = open().unwrap_err();
        assert!(second.message.ends_with("o.json.partial.jsonl is being written by another evaluation"), "{second:?}");
        drop(first);
        assert_eq!(open(), Ok(0));
    }
}
