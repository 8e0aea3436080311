//! Looking.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::cli::build;
use crate::cli::device::{DeviceMemory, cuda_memory};
use crate::cli::front::Secrets;
use crate::cli::listen::open_files;
use crate::cli::output::Failure;
use crate::config::{self, Config};

/// What was seen. `None` where the system does not say.
#[derive(Debug)]
pub struct Seen {
    pub cores: Option<usize>,
    /// Instruction sets that speed computing up, and whether there are.
    pub features: Vec<(&'static str, bool)>,
    pub memory: Memory,
    /// The devices, or why there are none.
    pub cuda: Result<Vec<DeviceMemory>, String>,
    pub files: Files,
    /// Where plugins are looked up, and what is there.
    pub plugins: Vec<(PathBuf, Directory)>,
    /// The file, and whether a server would start with it.
    pub config: Option<(PathBuf, Result<(), String>)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    pub total: Option<u64>,
    pub available: Option<u64>,
    /// Of the control group, in bytes.
    pub limit: Option<u64>,
    /// Processors that the control group may use.
    pub processors: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// `None`: without limit, or unknown.
    pub limit: Option<u64>,
    /// As many as are needed for the connections that are allowed.
    pub enough: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Directory {
    /// Plugins in it.
    Libraries(usize),
    /// Every user may put a plugin there.
    WritableByAll(u32),
    Absent,
    Unreadable(String),
}

impl Seen {
    /// Things that keep a server from working, or make it unsafe.
    pub fn faults(&self) -> usize {
        let unsafe_places = self.plugins.iter().filter(|(_, found)| found.is_fault()).count();
        let config = self.config.as_ref().is_some_and(|(_, outcome)| outcome.is_err());
        unsafe_places + usize::from(config)
    }
}

impl Directory {
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::WritableByAll(_) | Self::Unreadable(_))
    }
}

pub fn look(file: Option<&Path>) -> Seen {
    let loaded = file.map(|file| (file.to_path_buf(), Config::load(file, &config::environment())));
    let executable = std::env::current_exe().ok();
    let directories = match &loaded {
        Some((_, Ok(config))) => config::plugin_directories(config, executable.as_deref()),
        _ => executable.as_deref().and_then(Path::parent).map(Path::to_path_buf).into_iter().collect(),
    };
    let connections = match &loaded {
        Some((_, Ok(config))) => config.server.front.limits.connections,
        _ => crate::api::Limits::default().connections,
    };
    let limit = read("/proc/self/limits").as_deref().and_then(open_files);
    Seen {
        cores: std::thread::available_parallelism().ok().map(usize::from),
        features: features(),
        memory: memory(&|path| read(path)),
        cuda: devices(&cuda_memory),
        files: Files { limit, enough: limit.is_none_or(|limit| limit > connections as u64) },
        plugins: directories.into_iter().map(|path| (path.clone(), directory(&path))).collect(),
        config: loaded.map(|(path, loaded)| (path, checked(loaded).map_err(|failure| failure.line()))),
    }
}

fn checked(loaded: Result<Config, config::ConfigError>) -> Result<(), Failure> {
    let config = loaded.map_err(Failure::input)?;
    drop(Secrets::read(&config)?);
    build::prepare(config).map(drop)
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<(&'static str, bool)> {
    vec![
        ("avx2", std::is_x86_feature_detected!("avx2")),
        ("fma", std::is_x86_feature_detected!("fma")),
        ("avx512f", std::is_x86_feature_detected!("avx512f")),
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

/// By the texts of the system's files.
fn memory(read: &dyn Fn(&str) -> Option<String>) -> Memory {
    let meminfo = read("/proc/meminfo").unwrap_or_default();
    let line = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let quota = read("/sys/fs/cgroup/cpu.max").and_then(|text| {
        let (quota, period) = text.trim().split_once(' ')?;
        Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok().filter(|period| *period > 0.0)?)
    });
    Memory {
        total: line("MemTotal:"),
        available: line("MemAvailable:"),
        limit: read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse().ok()),
        processors: quota,
    }
}

/// All devices, or why there is not even the first.
fn devices(look: &dyn Fn(u32) -> Result<DeviceMemory, String>) -> Result<Vec<DeviceMemory>, String> {
    let first = look(0)?;
    Ok(std::iter::once(first).chain((1..64).map_while(|ordinal| look(ordinal).ok())).collect())
}

fn directory(path: &Path) -> Directory {
    const SHARED: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Directory::Absent,
        Err(error) => return Directory::Unreadable(error.to_string()),
    };
    let mode = found.permissions().mode();
    if mode & SHARED != 0 && mode & STICKY == 0 {
        return Directory::WritableByAll(mode & 0o7777);
    }
    match fs::read_dir(path) {
        Ok(entries) => {
            let is_plugin = |path: &Path| path.extension().is_some_and(|e| e == "so" || e == "wasm" || e == "wat");
            Directory::Libraries(entries.flatten().filter(|entry| is_plugin(&entry.path())).count())
        }
        Err(error) => Directory::Unreadable(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_control_group() {
        let files = |path: &str| {
            let text = match path {
                "/proc/meminfo" => "MemTotal:  2000 kB\nMemAvailable: 1000 kB\n",
                "/sys/fs/cgroup/memory.max" => "1048576\n",
                "/sys/fs/cgroup/cpu.max" => "150000 100000\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        let expected = Memory {
            total: Some(2_048_000),
            available: Some(1_024_000),
            limit: Some(1_048_576),
            processors: Some(1.5),
        };
        assert_eq!(memory(&files), expected);
        assert_eq!(memory(&|_| Some("max 100000".into())), Memory::default());
        assert_eq!(memory(&|_| None), Memory::default());
    }

    #[test]
    fn devices_end_where_none_is_found() {
        let one = |name: &str| DeviceMemory { total: 2, free: 1, name: name.into() };
        let look = |ordinal| if ordinal < 2 { Ok(one("d")) } else { Err("no such device".to_owned()) };
        assert_eq!(devices(&look), Ok(vec![one("d"), one("d")]));
        assert_eq!(devices(&|_| Err("no driver".into())), Err("no driver".into()));
    }

    #[test]
    fn directories_of_plugins() {
        let place = tempfile::tempdir().unwrap();
        assert_eq!(directory(&place.path().join("nowhere")), Directory::Absent);
        fs::write(place.path().join("p.so"), "").unwrap();
        fs::write(place.path().join("notes"), "").unwrap();
        assert_eq!(directory(place.path()), Directory::Libraries(1));
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(directory(place.path()), Directory::WritableByAll(0o777));
        assert!(matches!(directory(&place.path().join("p.so")), Directory::Unreadable(_)));
    }
}
