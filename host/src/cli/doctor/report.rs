//! Telling what was seen. Pure.

use serde_json::{Value, json};

use super::look::{Directory, Seen};

fn build() -> &'static str {
    if cfg!(debug_assertions) { "debug" } else { "release" }
}

fn bytes(bytes: Option<u64>) -> String {
    match bytes {
        Some(bytes) => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
        None => "unknown".into(),
    }
}

fn described(found: &Directory) -> String {
    match found {
        Directory::Libraries(1) => "1 plugin".into(),
        Directory::Libraries(count) => format!("{count} plugins"),
        Directory::WritableByAll(mode) => {
            format!("every user may put a plugin there (mode {mode:o}); chmod o-w it")
        }
        Directory::Absent => "does not exist".into(),
        Directory::Unreadable(error) => format!("cannot be read: {error}"),
    }
}

/// One line for each thing: a mark, its name, what it is. `!` marks a fault, `?` what may become one.
pub fn text(seen: &Seen) -> String {
    let mut lines = Vec::new();
    let mut line = |mark: char, name: &str, value: String| lines.push(format!("{mark} {name:<12} {value}\n"));
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    line(' ', "version", format!("{} ({os} {arch}, {} build)", env!("CARGO_PKG_VERSION"), build()));
    let features = seen.features.iter().map(|(name, has)| if *has { (*name).into() } else { format!("no {name}") });
    let features = features.collect::<Vec<String>>().join(", ");
    let slow = seen.features.iter().any(|(name, has)| *name != "avx512f" && !has);
    let cores = seen.cores.map_or("unknown".into(), |cores| cores.to_string());
    line(if slow { '?' } else { ' ' }, "processor", format!("{cores} cores; {features}"));
    let memory = &seen.memory;
    line(' ', "memory", format!("{}, of which {} are free", bytes(memory.total), bytes(memory.available)));
    let limit = memory.limit.map_or("no limit on memory".into(), |limit| format!("{} of memory", bytes(Some(limit))));
    let processors = memory.processors.map_or("none on processors".into(), |count| format!("{count} processors"));
    line(' ', "cgroup", format!("{limit}, {processors}"));
    match &seen.cuda {
        Ok(devices) => {
            for (ordinal, device) in devices.iter().enumerate() {
                let (total, free) = (bytes(Some(device.total)), bytes(Some(device.free)));
                line(' ', &format!("cuda:{ordinal}"), format!("{}, {total}, of which {free} are free", device.name));
            }
        }
        Err(reason) => line(' ', "cuda", format!("none: {reason}")),
    }
    let files = seen.files.limit.map_or("no limit".into(), |limit| format!("{limit} may be open"));
    let enough = if seen.files.enough { "" } else { ", fewer than server.max_connections; raise `ulimit -n`" };
    line(if seen.files.enough { ' ' } else { '?' }, "files", format!("{files}{enough}"));
    for (path, found) in &seen.plugins {
        let mark = if found.is_fault() { '!' } else { ' ' };
        line(mark, "plugins", format!("{}: {}", path.display(), described(found)));
    }
    match &seen.config {
        Some((path, Ok(()))) => line(' ', "config", format!("{}: can be prepared", path.display())),
        Some((_, Err(error))) => line('!', "config", error.clone()),
        None => {}
    }
    lines.concat()
}

pub fn json(seen: &Seen) -> Value {
    let features: serde_json::Map<String, Value> =
        seen.features.iter().map(|(name, has)| ((*name).into(), (*has).into())).collect();
    let cuda = match &seen.cuda {
        Ok(devices) => {
            let device =
                |d: &crate::cli::device::DeviceMemory| json!({"name": d.name, "total": d.total, "free": d.free});
            json!({"devices": devices.iter().map(device).collect::<Vec<_>>()})
        }
        Err(reason) => json!({"devices": [], "reason": reason}),
    };
    let plugins = seen.plugins.iter();
    let plugins =
        plugins.map(|(path, found)| json!({"path": path, "ok": !found.is_fault(), "found": described(found)}));
    let config = seen
        .config
        .as_ref()
        .map(|(path, outcome)| json!({"path": path, "ok": outcome.is_ok(), "error": outcome.as_ref().err()}));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
        "build": build(),
        "processor": {"cores": seen.cores, "features": features},
        "memory": {"total": seen.memory.total, "available": seen.memory.available},
        "cgroup": {"memory": seen.memory.limit, "processors": seen.memory.processors},
        "cuda": cuda,
        "files": {"limit": seen.files.limit, "enough": seen.files.enough},
        "plugins": plugins.collect::<Vec<_>>(),
        "config": config,
        "faults": seen.faults(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::look::{Files, Memory};
    use super::*;

    #[test]
    fn faults_are_marked_and_counted() {
        let mut seen = Seen {
            cores: Some(2),
            features: vec![("avx2", true), ("avx512f", false)],
            memory: Memory { total: Some(3 << 29), ..Memory::default() },
            cuda: Err("libcuda.so.1 was not found".into()),
            files: Files { limit: Some(1024), enough: false },
            plugins: vec![("/p".into(), Directory::WritableByAll(0o777)), ("/q".into(), Directory::Libraries(1))],
            config: Some(("c.toml".into(), Err("c.toml:2: wrong".into()))),
        };
        assert_eq!(seen.faults(), 2);
        let told = text(&seen);
        for line in [
            "  processor    2 cores; avx2, no avx512f\n",
            "  memory       1.5 GiB, of which unknown are free\n",
            "  cgroup       no limit on memory, none on processors\n",
            "  cuda         none: libcuda.so.1 was not found\n",
            "? files        1024 may be open, fewer than server.max_connections; raise `ulimit -n`\n",
            "! plugins      /p: every user may put a plugin there (mode 777); chmod o-w it\n",
            "  plugins      /q: 1 plugin\n",
            "! config       c.toml:2: wrong\n",
        ] {
            assert!(told.contains(line), "{line}{told}");
        }
        let value = json(&seen);
        assert_eq!((&value["faults"], &value["plugins"][0]["ok"]), (&json!(2), &json!(false)));
        assert_eq!(value["config"]["error"], "c.toml:2: wrong");
        (seen.plugins, seen.config) = (vec![], None);
        assert_eq!((seen.faults(), json(&seen)["config"].clone()), (0, Value::Null));
    }
}
