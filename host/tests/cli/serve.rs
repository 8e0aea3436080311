//! Running servers: ports, signals, logs and the door.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Child;

use super::*;

#[test]
fn a_port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let refused = refusal(&run(&["serve", "config/demo.toml", "--port", &port.to_string()]));
    assert_eq!(
        refused,
        format!(
            "server.port = {port}: 127.0.0.1:{port} is in use; stop the program that listens there, or choose another port with --port"
        )
    );
}

/// Before anything is loaded: the model does not exist.
#[test]
fn an_admin_address_in_the_way_of_the_servers_own() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.toml");
    std::fs::write(&file, format!("[server]\nadmin = \"{free}\"\n[models.m]\npath = \"m\"\n")).unwrap();
    let (file, port) = (file.to_str().unwrap(), free.port().to_string());
    let refused = refusal(&run(&["serve", file, "--host", "0.0.0.0", "--port", &port]));
    assert!(refused.starts_with(&format!("server.admin = \"{free}\": cannot listen there (")), "{refused}");
}

/// The demo has four models, and one reason holds for all of them.
#[test]
fn why_models_are_on_the_cpu_is_told_once() {
    let output = run(&["check", "config/demo.toml", "--log", "info"]);
    let log = text(&output.stderr);
    let expected = usize::from(!log.contains("device auto: cuda:0"));
    assert_eq!(log.matches("device auto: the CPU, since ").count(), expected, "{log}");
}

/// A running server; ended when a test fails.
struct Server {
    process: Child,
    address: String,
    /// Who needs a key, as the start says.
    keys: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    fn start() -> Self {
        Self::logging("warn", Stdio::null())
    }

    fn logging(filter: &str, stderr: impl Into<Stdio>) -> Self {
        Self::with(&[], filter, stderr)
    }

    fn with(variables: &[(&str, &str)], filter: &str, stderr: impl Into<Stdio>) -> Self {
        let mut process = program()
            .args(["serve", "config/demo.toml", "--port", "0", "--log", filter])
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
        let screen: Vec<String> = lines.by_ref().take_while(|line| !line.starts_with("  curl")).collect();
        let first = screen.iter().find(|line| line.contains("serves config/demo.toml")).unwrap();
        let keys = first.split(['(', ')']).nth(1).unwrap();
        // A Unix socket may stand behind it.
        let address = first.split("http://").nth(1).unwrap().split(" and ").next().unwrap().to_owned();
        // Dropping the pipe is fine: a server does not die of a reader who leaves.
        Self { process, address, keys: keys.into() }
    }

    fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }
}

fn completion(max_tokens: u32) -> String {
    let body = format!(
        r#"{{"model": "rstitch", "prompt": "Q:", "max_tokens": {max_tokens}, "ignore_eos": true, "temperature": 0, "stream": true}}"#
    );
    let length = body.len();
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

#[test]
fn serving_and_draining() {
    let mut server = Server::start();
    assert_eq!(server.keys, "no API key required");
    let mut answer = String::new();
    server.send("GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");

    // A request that runs when the signal comes is answered to its end.
    let mut running = begun(server.send(&completion(200)));
    server.signal("TERM");
    let mut rest = String::new();
    running.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
    assert!(TcpStream::connect(&server.address).is_err());
}

/// Lines up to the first event of a stream.
fn begun(stream: TcpStream) -> BufReader<TcpStream> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert_ne!(stream.read_line(&mut line).unwrap(), 0, "no event came");
    }
    stream
}

#[test]
fn bug_72_a_signal_under_load_breaks_nothing_off() {
    let mut server = Server::start();
    let streams: Vec<TcpStream> = (0..64).map(|_| server.send(&completion(60))).collect();
    let streams: Vec<_> = streams.into_iter().map(begun).collect();
    server.signal("TERM");
    for mut stream in streams {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    }
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
}

/// A signal that comes while models are read ends the server as well.
#[test]
fn bug_72_a_signal_during_the_start() {
    let mut process = program()
        .args(["serve", "config/demo.toml", "--port", "0"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Its handler is in place when SIGTERM is among the signals that it catches.
    let pid = process.id();
    let caught = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        u64::from_str_radix(&mask, 16).unwrap() & (1 << 14) != 0
    };
    while !caught() {
        assert!(process.try_wait().unwrap().is_none(), "the server ended by itself");
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-TERM", &pid.to_string()]).status().unwrap().success());
    assert_eq!(process.wait().unwrap().code(), Some(0));
}

#[test]
fn a_recording() {
    let dir = tempfile::tempdir().unwrap();
    let recordings = dir.path().join("recordings");
    let variables = [
        ("TOKENROUTER__RECORD__DIRECTORY", recordings.to_str().unwrap()),
        ("TOKENROUTER__RECORD__REQUESTS", "true"),
        ("TOKENROUTER__RECORD__ROUTES", "rstitch"),
    ];
    let mut server = Server::with(&variables, "warn", Stdio::null());
    let mut answer = String::new();
    server.send(&completion(30)).read_to_string(&mut answer).unwrap();
    assert!(answer.contains("data: [DONE]"), "{answer}");
    server.signal("TERM");
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
    let run = recordings.join("run-00000");
    let manifest: Value = serde_json::from_slice(&std::fs::read(run.join("manifest.json")).unwrap()).unwrap();
    assert_eq!((&manifest["stopped"], &manifest["dropped_rows"]), (&"shutdown".into(), &0.into()));
    assert!(manifest["rows"].as_u64().unwrap() >= 30, "{manifest}");
    let line: Value = serde_json::from_slice(&std::fs::read(run.join("requests-00000.jsonl")).unwrap()).unwrap();
    assert_eq!((line["token_ids"].as_array().unwrap().len(), &line["end"]), (30, &"length".into()));

    // A directory that holds something else is refused before any model is read.
    std::fs::write(recordings.join("notes"), "").unwrap();
    for command in ["check", "serve"] {
        let output = program().args([command, "config/demo.toml"]).envs(variables).output().unwrap();
        let message = refusal(&output);
        assert!(message.contains("record.directory = ") && message.contains("holds \"notes\""), "{message}");
    }
}

#[test]
fn logs_that_nobody_reads() {
    // The third is a full pipe with a reader that never reads; its writers block.
    let (_reader, writer) = std::io::pipe().unwrap();
    let mut filler = writer.try_clone().unwrap();
    std::thread::spawn(move || while filler.write_all(&[b'.'; 512]).is_ok() {});
    for stderr in [broken_pipe(), full_disk(), writer.into()] {
        let mut server = Server::logging("trace", stderr);
        for _ in 0..3 {
            let mut answer = String::new();
            server.send(&completion(100)).read_to_string(&mut answer).unwrap();
            assert!(answer.contains("data: [DONE]"), "{answer}");
        }
        server.signal("TERM");
        assert_eq!(server.process.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut server = Server::logging("warn", Stdio::piped());
    let mut running = BufReader::new(server.send(&completion(2000)));
    let mut line = String::new();
    running.read_line(&mut line).unwrap();
    server.signal("INT");
    // While it drains the server still answers, and says that it is going.
    let mut answer = String::new();
    while !answer.starts_with("HTTP/1.1 503") {
        answer.clear();
        server.send("GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").read_to_string(&mut answer).unwrap();
    }
    server.signal("INT");
    assert_eq!(server.process.wait().unwrap().code(), Some(1));
    let mut log = String::new();
    server.process.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("signal again to end at once"), "{log}");
}

#[test]
fn what_a_server_is_told_by_its_door() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "# clients\nann 0123456789abcdef\n").unwrap();
    let (socket, notify) = (dir.path().join("s"), dir.path().join("n"));
    let systemd = std::os::unix::net::UnixDatagram::bind(&notify).unwrap();
    let told = || {
        let mut state = [0; 64];
        let length = systemd.recv(&mut state).unwrap();
        text(&state[..length])
    };
    let variables = [
        ("TOKENROUTER__SERVER__API_KEY_FILE", keys.to_str().unwrap()),
        ("TOKENROUTER__SERVER__UNIX_SOCKET", socket.to_str().unwrap()),
        ("TOKENROUTER__SERVER__DRAIN_GRACE_S", "86400"),
        ("NOTIFY_SOCKET", notify.to_str().unwrap()),
    ];
    let mut server = Server::with(&variables, "warn", Stdio::null());
    assert_eq!((server.keys.as_str(), told().as_str()), ("API key required, 1 in force", "READY=1"));
    let ask = |path: &str, key: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer[9..12].to_owned()
    };
    assert_eq!(ask("/v1/models", "fedcba9876543210"), "401");
    assert_eq!(ask("/v1/models", "0123456789abcdef"), "200");
    // Keys are reloaded; a file that is wrong changes nothing.
    std::fs::write(&keys, "short").unwrap();
    server.signal("HUP");
    std::fs::write(&keys, "bob fedcba9876543210\n").unwrap();
    while ask("/v1/models", "fedcba9876543210") != "200" {
        server.signal("HUP");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(ask("/v1/models", "0123456789abcdef"), "401");
    // Requests are still taken after the signal, while probes hear that it goes.
    server.signal("TERM");
    assert_eq!(told(), "STOPPING=1");
    while ask("/ready", "") != "503" {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let request = completion(5).replace("Host: x", "Host: x\r\nX-Api-Key: fedcba9876543210");
    let mut answer = String::new();
    server.send(&request).read_to_string(&mut answer).unwrap();
    assert!(answer.contains("data: [DONE]"), "{answer}");
    server.signal("TERM");
    assert_eq!(server.process.wait().unwrap().code(), Some(1));
    assert!(!socket.exists());
}

#[test]
fn mistakes_at_the_door_show_before_models_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "short\n").unwrap();
    // Others may not read it, or that would be said as well.
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let path = file.to_str().unwrap();
    for (variable, message) in [
        ("TOKENROUTER__SERVER__API_KEY_FILE", "line 1: must be a string of 16 to 256 letters"),
        ("TOKENROUTER__SERVER__UNIX_SOCKET", "is not a socket; choose another path"),
    ] {
        let output = program().args(["serve", "config/demo.toml", "--port", "0"]).env(variable, path).output().unwrap();
        let refused = refusal(&output);
        assert!(refused.contains(message) && refused.contains(path) && !refused.contains("short"), "{refused}");
    }
    let (_dir, config) = copied(&format!("{ONE}[server.tls]\ncert = 'c.toml'\nkey = 'c.toml'\n"));
    for command in ["check", "serve"] {
        let refused = refusal(&run(&[command, &config]));
        assert!(refused.contains("server.tls.cert = ") && refused.ends_with("has no certificate; give a file in PEM"));
    }
}
