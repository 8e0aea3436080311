//! A kernel fault under a server: what it hits ends with an error, and the server says so.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokenrouter_kernels::gpu::{Args, Device, DevicePtr, Function, Launch, Module, Priority, Program, Stream, launch};

use crate::demo::{Setup, engine, rstitch};
use crate::http::{send, start};

/// Of each answer; enough that none ends before the fault.
const TOKENS: u32 = 900;

/// A kernel that writes where nothing is. The fault is the whole context's: every model of this process is on it.
struct Fault(Function, Stream);

impl Fault {
    fn new() -> Self {
        let source = "extern \"C\" __global__ void fault(int* to) { *to = 1; }";
        let program = Program { name: "fault.cu", source, headers: &[], defines: &[], arch_suffix: "" };
        let device = Device::open(0).expect("a device");
        let function = Module::compile(&device, &program, None).expect("compiles").function("fault");
        Self(function.expect("the kernel"), Stream::new(&device, Priority::High).expect("a stream"))
    }

    #[allow(unsafe_code)] // Launching a kernel is unsafe, and this one means it.
    fn happen(&self) {
        let one = Launch { grid: [1, 1, 1], block: 1, cluster: 1, shared: 0, overlap: false };
        // SAFETY: none: the address belongs to nobody, so that the device faults.
        unsafe { launch(&self.0, &one, &self.1, Args::new().ptr(DevicePtr(0x10))) }.expect("launched");
        self.1.synchronize().expect_err("the fault is seen");
    }
}

/// Status line and body of `GET path`.
fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").expect("sent");
    rest(&mut BufReader::new(stream))
}

fn rest(stream: &mut BufReader<TcpStream>) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the answer ends");
    text
}

/// Alone in its process, since the fault is for ever: `system-tests fault`.
#[test]
fn a_kernel_fault_ends_its_requests_and_the_server_is_no_longer_ready() {
    if std::env::var("TOKENROUTER_TEST_DEVICE").as_deref() != Ok("cuda") {
        println!("skipped: needs a GPU and TOKENROUTER_TEST_DEVICE=cuda");
        return;
    }
    let fault = Fault::new();
    let engine = Arc::new(engine(&Setup::default(), &[rstitch("rstitch", 0.03)]));
    let (address, stop, server) = start(&engine);
    assert!(get(address, "/ready").starts_with("HTTP/1.1 200"));
    let body = |route: &str| -> Value {
        json!({"model": route, "stream": true, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": true,
               "messages": [{"role": "user", "content": "What is 47 * 83?"}]})
    };
    let streams = ["rstitch", "large", "small"].map(|route| {
        let mut stream = BufReader::new(send(address, &body(route)));
        let mut line = String::new();
        while !line.contains("\"content\":\"") {
            line.clear();
            assert!(stream.read_line(&mut line).expect("reads") > 0, "no token came");
        }
        stream
    });
    fault.happen();
    for mut stream in streams {
        let text = rest(&mut stream);
        assert!(text.contains("\"model_down\""), "{text}");
        assert!(!text.contains("\"finish_reason\":\"stop\""), "{text}");
    }
    let ready = get(address, "/ready");
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("model_down"), "{ready}");
    assert!(get(address, "/health").starts_with("HTTP/1.1 200"));
    let refused = rest(&mut BufReader::new(send(address, &body("large"))));
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    drop(stop);
    server.join().expect("the server ends well");
    assert_eq!(engine.live_requests(), 0);
}
