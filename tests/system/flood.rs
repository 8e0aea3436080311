//! Ten thousand connections in waves, good and bad, while one client streams: it gets its whole answer, most of the
//! flood is turned away, and every socket is given back.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokenrouter::api::Limits;

use crate::demo::{Setup, engine, rstitch};
use crate::http::{send, start_with};
use crate::load::{body, text, written};

const WAVES: usize = 50;
const WAVE: usize = 200;
/// Fewer than a wave has, so that the door is closed to some.
const SEATS: usize = 100;

/// What the flood sends: nothing, half a head, what is not HTTP, a probe, a request without its body, a bad one.
const SENT: [&str; 6] = [
    "",
    "POST /v1/chat/completions HT",
    "\u{1}\u{2}\u{3}\r\n\r\n",
    "GET /health HTTP/1.1\r\nhost: f\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nhost: f\r\ncontent-length: 1000\r\n\r\n{",
    "POST /v1/completions HTTP/1.1\r\nhost: f\r\ncontent-length: 2\r\n\r\n{}",
];

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux").count()
}

/// The text of a stream on a connection that stays open.
fn ask(stream: &mut TcpStream, body: &Value) -> String {
    let body = body.to_string();
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).expect("sent");
    let (mut raw, mut part) = (Vec::new(), [0; 4096]);
    while !raw.ends_with(b"0\r\n\r\n") {
        let read = stream.read(&mut part).expect("reads");
        assert_ne!(read, 0, "the server broke the stream off");
        raw.extend_from_slice(&part[..read]);
    }
    written(&String::from_utf8(raw).expect("UTF-8"))
}

/// The first line of an answer to a probe.
fn probe(address: SocketAddr) -> String {
    let mut answer = String::new();
    if let Ok(mut stream) = TcpStream::connect(address) {
        let _ = stream.write_all(b"GET /ready HTTP/1.1\r\nhost: f\r\nconnection: close\r\n\r\n");
        let _ = stream.read_to_string(&mut answer);
    }
    answer.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn a_flood_of_connections() {
    let engine = Arc::new(engine(&Setup::default(), &[rstitch("rstitch", 0.03)]));
    // Half a head that has a seat is not waited for.
    let limits = Limits { connections: SEATS, header_timeout: Duration::from_millis(200), ..Limits::default() };
    let (address, stop, server) = start_with(&engine, |state| state.front.limits = limits);
    let asked = body("rstitch", "What is 47 * 83?");
    let expected = text(&mut send(address, &asked));
    let files = open_files();
    let over = Arc::new(AtomicBool::new(false));
    // It has its seat before the flood, and asks again and again until that is over.
    let mut kept = TcpStream::connect(address).expect("connected");
    kept.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
    let first = ask(&mut kept, &asked);
    let client = std::thread::spawn({
        let (over, asked) = (over.clone(), asked.clone());
        move || {
            let mut answers = vec![first];
            while !over.load(Ordering::Relaxed) {
                answers.push(ask(&mut kept, &asked));
            }
            answers
        }
    });
    let (mut tried, mut refused) = (0, 0);
    for _ in 0..WAVES {
        let mut wave = Vec::with_capacity(WAVE);
        for number in 0..WAVE {
            tried += 1;
            let Ok(mut stream) = TcpStream::connect(address) else { continue };
            // Whoever was turned away may have been closed already.
            let _ = stream.write_all(SENT[number % SENT.len()].as_bytes());
            wave.push(stream);
        }
        // One of those that came last hears why, or finds it closed.
        if let Some(last) = wave.last_mut() {
            last.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
            let mut told = [0; 12];
            let read = last.read(&mut told).unwrap_or(0);
            refused += usize::from(read == 0 || told.starts_with(b"HTTP/1.1 503"));
        }
        for stream in wave {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
    assert_eq!(tried, WAVES * WAVE);
    assert!(refused > 0, "the door was never closed");
    over.store(true, Ordering::Relaxed);
    let answers = client.join().expect("no panic");
    assert!(answers.iter().all(|answer| *answer == expected), "{answers:?}");
    let deadline = Instant::now() + Duration::from_secs(60);
    while open_files() > files || !probe(address).starts_with("HTTP/1.1 200") {
        assert!(Instant::now() < deadline, "{} files are open, {files} were before", open_files());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(text(&mut send(address, &asked)), expected);
    drop(stop);
    server.join().expect("the server ends well");
}
