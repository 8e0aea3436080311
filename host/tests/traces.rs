//! The program sends its last spans before it ends.
#![cfg(feature = "otel")]
#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;

/// The names of the spans of each message that comes.
fn collector() -> (String, Receiver<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, messages) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let mut length = 0;
            for line in stream.by_ref().lines().map(Result::unwrap).take_while(|line| !line.is_empty()) {
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            let message = ExportTraceServiceRequest::decode(body.as_slice()).unwrap();
            let scopes = message.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
            let names = scopes.flat_map(|scope| scope.spans).map(|span| span.name).collect();
            if sender.send(names).is_err() {
                return;
            }
            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        }
    });
    (url, messages)
}

struct Server(Child, String);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server with one model, and where it is.
fn server(endpoint: &str) -> Server {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("models/demo/small");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    let config = format!(
        "[models.m]\npath = {:?}\nkv_memory = '8MiB'\n[traces]\nendpoint = {endpoint:?}\n",
        model.display().to_string()
    );
    std::fs::write(&file, config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TOKENROUTER__")) {
        command.env_remove(name);
    }
    let file = file.display().to_string();
    let mut process = command
        .args(["serve", &file, "--port", "0", "--log", "warn"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
    let screen: Vec<String> = lines.take_while(|line| !line.starts_with("  curl")).collect();
    assert!(screen.contains(&format!("Tracing requests, to {endpoint}/v1/traces")), "{screen:?}");
    let first = screen.iter().find(|line| line.contains(" serves ")).unwrap();
    let address = first.split("http://").nth(1).unwrap().to_owned();
    Server(process, address)
}

#[test]
fn the_last_spans_are_sent_at_the_end() {
    let (endpoint, messages) = collector();
    let mut server = server(&endpoint);
    let body = r#"{"model": "m", "prompt": "Q:", "max_tokens": 4, "ignore_eos": true}"#;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(&server.1).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let pid = server.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
    let names: Vec<String> = messages.try_iter().flatten().collect();
    assert_eq!(names, ["POST /v1/completions", "visit m"]);
}
