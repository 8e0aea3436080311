//! A server whose configuration changes a hundred times under load: no request fails, every text is that of the
//! policy that the request began with, and the process grows by nothing.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::demo::root;
use crate::http::send;

const CLIENTS: usize = 32;
/// Changes before the process is measured, and after.
const WARM_UP: usize = 20;
const RELOADS: usize = 80;
/// At each of the seeds the policies give this prompt other answers.
const PROMPT: &str = "What is 905 - 278 + 14?";
const SEEDS: usize = 3;
/// Memory of the process may change by this. A router network of the second policy that is not given up is
/// 4 MB, and 40 times that are far beyond it.
const SLACK: u64 = 24 << 20;

/// Two policies that say different things. The second one has a router network.
const POLICIES: [&str; 2] = [
    "plugin = \"rstitch\"\nroles = { small = \"slm\", large = \"llm\" }\n[routes.r.settings]\nthreshold = 0.03\n",
    "plugin = \"r2r\"\nroles = { small = \"slm\", large = \"llm\" }\n[routes.r.settings]\nrouter = \"ROOT/models/demo/routers/r2r/router.safetensors\"\nthreshold = 0.5\n",
];

/// What cannot be taken over, and what is said of it.
const BROKEN: [(&str, &str); 5] = [
    (
        "plugin = \"rstitch\"\nroles = { small = \"slm\", large = \"llm\" }\n[routes.r.settings]\nthreshold = \"high\"\n",
        "routes.r.settings",
    ),
    ("plugin = \"no-such\"\nroles = { small = \"slm\", large = \"llm\" }\n", "no-such"),
    ("plugin = \"rstitch\"\nroles = { small = \"slm\", huge = \"llm\" }\n", "there is no model `huge`"),
    (
        "plugin = \"rstitch\"\nroles = { small = \"slm\", large = \"llm\" }\n[models.more]\npath = \"x\"\n",
        "restart to change it",
    ),
    ("plugin = \n", "not valid TOML"),
];

/// The program in a directory of its own.
pub struct Server {
    child: Child,
    pub address: SocketAddr,
    admin: SocketAddr,
    pub directory: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        Self::with(POLICIES[0])
    }

    /// With this as the table of route `r`.
    pub fn with(policy: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        write(directory.path(), policy);
        let test = std::env::current_exe().expect("a test has an executable");
        let program: PathBuf = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST").join("tokenrouter");
        assert!(program.is_file(), "{} is not built; run the tests with `cargo xtask test`", program.display());
        let mut command = Command::new(program);
        command.arg("serve").arg(directory.path().join("c.toml")).stdin(Stdio::null()).stdout(Stdio::piped());
        let log = std::fs::File::create(directory.path().join("log")).expect("a log");
        let mut child = command.stderr(log).env("MALLOC_ARENA_MAX", "2").spawn().expect("the program starts");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut find = |before: &str| -> SocketAddr {
            let line = lines.by_ref().map(|line| line.expect("text")).find(|line| line.contains(before));
            let line = line.unwrap_or_else(|| panic!("{before}: {}", log_of(directory.path())));
            line.rsplit_once("http://").expect("an address").1.trim().parse().expect("an address")
        };
        let (address, admin) = (find("at http://"), find("Admin endpoints at http://"));
        // Nobody else reads what it says.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, admin, directory }
    }

    /// Status and JSON.
    pub fn admin(&self, request: &str) -> (u16, Value) {
        let mut stream = TcpStream::connect(self.admin).expect("connected");
        write!(stream, "{request} HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the answer ends");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
        (head[9..12].parse().expect("a status"), serde_json::from_str(body).expect("JSON"))
    }

    pub fn reload(&self, policy: &str) -> (u16, Value) {
        write(self.directory.path(), policy);
        self.admin("POST /admin/reload")
    }

    /// Files that are open while nobody is connected, and bytes of memory.
    pub fn takes(&self) -> (usize, u64) {
        let process = Path::new("/proc").join(self.child.id().to_string());
        // The last connections are closed a little after their clients have left.
        let open = |_| {
            std::thread::sleep(Duration::from_millis(10));
            std::fs::read_dir(process.join("fd")).expect("it lives").count()
        };
        let files = (0..100).map(open).min().expect("looked at");
        let status = std::fs::read_to_string(process.join("status")).expect("it lives");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
        (files, kib << 10)
    }

    /// Wait until nothing is under way and one route and two models are known.
    pub fn settle(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let (_, known) = self.admin("GET /admin/routes");
            let routes = known["routes"].as_array().expect("a list");
            if routes.len() == 3 && routes.iter().all(|r| r["state"] == "serving" && r["requests"] == 0) {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {known}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn log_of(directory: &Path) -> String {
    std::fs::read_to_string(directory.join("log")).unwrap_or_default()
}

fn write(directory: &Path, policy: &str) {
    let test = std::env::current_exe().expect("a test has an executable");
    let plugins = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST").display().to_string();
    let plugins = std::env::var("TOKENROUTER_TEST_PLUGINS").unwrap_or(plugins);
    let text = format!(
        "plugin_dirs = [\"{plugins}\"]\n[server]\nport = 0\nadmin = \"127.0.0.1:0\"\n\
         [models.small]\npath = \"ROOT/models/demo/small\"\ndevice = \"cpu\"\npages = 512\n\
         [models.large]\npath = \"ROOT/models/demo/large\"\ndevice = \"cpu\"\npages = 512\n[routes.r]\n{policy}"
    );
    let text = text.replace("ROOT", &root().display().to_string());
    std::fs::write(directory.join("c.toml"), text).expect("written");
}

fn body(seed: usize) -> Value {
    json!({"model": "r", "stream": true, "temperature": 1.5, "seed": seed + 1, "max_tokens": 16,
           "messages": [{"role": "user", "content": PROMPT}]})
}

/// The text of an answer that must be whole; `begun` is called once it has begun.
fn ask(address: SocketAddr, seed: usize, begun: impl FnOnce()) -> Result<String, String> {
    let mut stream = BufReader::new(send(address, &body(seed)));
    let mut raw = String::new();
    stream.read_line(&mut raw).map_err(|e| e.to_string())?;
    begun();
    stream.read_to_string(&mut raw).map_err(|e| e.to_string())?;
    if !raw.starts_with("HTTP/1.1 200") || !raw.contains("data: [DONE]") || raw.contains("\"error\"") {
        return Err(raw);
    }
    let chunks = raw.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let chunks = chunks.map(|data| serde_json::from_str::<Value>(data).map_err(|e| e.to_string()));
    chunks.map(|chunk| Ok(chunk?["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned())).collect()
}

/// Streams under way while `changes` are made.
struct Load<'a> {
    server: &'a Server,
    /// By policy and seed.
    expected: &'a [Vec<String>],
    /// Twice the number of changes so far, and one more while one is being made.
    moment: AtomicUsize,
    done: AtomicBool,
    answers: AtomicUsize,
    /// Of those, answers that can only have met one policy.
    certain: AtomicUsize,
    wrong: Mutex<Vec<String>>,
}

impl Load<'_> {
    fn client(&self, client: usize) {
        let mut number = client;
        while !self.done.load(Ordering::SeqCst) {
            let seed = number % SEEDS;
            number += 1;
            let before = self.moment.load(Ordering::SeqCst);
            let mut after = before;
            let got = ask(self.server.address, seed, || after = self.moment.load(Ordering::SeqCst));
            let of = |policy: usize| &self.expected[policy][seed];
            let certain = before == after && before.is_multiple_of(2);
            let good = match &got {
                Ok(text) if certain => text == of(before / 2 % 2),
                Ok(text) => text == of(0) || text == of(1),
                Err(_) => false,
            };
            if !good {
                let wrong = format!("seed {seed} at {before}..{after}: {got:?}");
                self.wrong.lock().expect("no panic").push(wrong);
                return;
            }
            self.answers.fetch_add(1, Ordering::SeqCst);
            self.certain.fetch_add(usize::from(certain), Ordering::SeqCst);
        }
    }

    /// Make `count` changes, two answers or more apart, with a broken configuration at every tenth.
    fn change(&self, count: usize) {
        for number in 0..count {
            let answers = self.answers.load(Ordering::SeqCst);
            while self.answers.load(Ordering::SeqCst) < answers + 2 && self.wrong.lock().expect("no panic").is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
            if number % 10 == 9 {
                let (policy, says) = BROKEN[number / 10 % BROKEN.len()];
                let (status, refused) = self.server.reload(policy);
                let message = refused["error"]["message"].as_str().unwrap_or_default();
                assert!((400..500).contains(&status) && message.contains(says), "{status}: {refused}");
                continue;
            }
            let next = self.moment.fetch_add(1, Ordering::SeqCst) / 2 + 1;
            let (status, reloaded) = self.server.reload(POLICIES[next % 2]);
            assert_eq!((status, &reloaded["changed"]), (200, &json!(["r"])), "{reloaded}");
            self.moment.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Ends the clients however the changes end.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_hundred_reloads_under_load() {
    let server = Server::start();
    let mut expected: Vec<Vec<String>> = Vec::new();
    for policy in POLICIES {
        let (status, reloaded) = server.reload(policy);
        assert_eq!(status, 200, "{reloaded}");
        let alone = |seed| ask(server.address, seed, || ()).expect("an answer");
        expected.push((0..SEEDS).map(alone).collect());
    }
    assert!(expected[0].iter().zip(&expected[1]).all(|(a, b)| a != b), "the policies say the same: {expected:?}");
    let (status, reloaded) = server.reload(POLICIES[0]);
    assert_eq!((status, &reloaded["unchanged"]), (200, &json!([])), "{reloaded}");
    let load = Load {
        server: &server,
        expected: &expected,
        moment: AtomicUsize::new(0),
        done: AtomicBool::new(false),
        answers: AtomicUsize::new(0),
        certain: AtomicUsize::new(0),
        wrong: Mutex::default(),
    };
    let round = |changes| {
        load.done.store(false, Ordering::SeqCst);
        std::thread::scope(|scope| {
            let _stop = Stop(&load.done);
            for client in 0..CLIENTS {
                let load = &load;
                scope.spawn(move || load.client(client));
            }
            load.change(changes);
        });
        let wrong = load.wrong.lock().expect("no panic");
        assert!(wrong.is_empty(), "{wrong:?}\n{}", log_of(server.directory.path()));
        server.settle();
        server.takes()
    };
    let (files, memory) = round(WARM_UP);
    let (files_after, memory_after) = round(RELOADS);
    println!(
        "{} answers, {} of them certain; {files} then {files_after} files, {memory} then {memory_after} bytes",
        load.answers.load(Ordering::SeqCst),
        load.certain.load(Ordering::SeqCst)
    );
    assert!(load.certain.load(Ordering::SeqCst) > CLIENTS, "too few answers to tell");
    assert_eq!(files_after, files);
    assert!(memory_after < memory + SLACK, "{memory} bytes grew to {memory_after}");
}

/// The end of a request disables the route.
const DISABLES: &str = "plugin = \"probe\"\nroles = { small = \"slm\", large = \"llm\" }\n\
                        on_error = \"disable_route\"\n[routes.r.settings]\nserve = true\npanic = \"finished\"\n";

/// Ask once, and wait until that has disabled the route.
fn disable(server: &Server) {
    ask(server.address, 0, || ()).expect("an answer");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !ask(server.address, 0, || ()).is_err_and(|answer| answer.contains("route_disabled")) {
        assert!(Instant::now() < deadline, "it is not disabled: {}", log_of(server.directory.path()));
    }
}

#[test]
fn a_reload_enables_a_disabled_route() {
    let server = Server::with(DISABLES);
    for _ in 0..3 {
        disable(&server);
        // Of the same file.
        let (status, reloaded) = server.reload(DISABLES);
        assert_eq!((status, &reloaded["changed"]), (200, &json!(["r"])), "{reloaded}");
    }
    disable(&server);
    let (status, reloaded) = server.reload(POLICIES[0]);
    assert_eq!((status, &reloaded["changed"]), (200, &json!(["r"])), "{reloaded}");
    for seed in 0..2 {
        ask(server.address, seed, || ()).expect("an answer");
    }
    server.settle();
}

/// The route stays what its recording says it is.
#[test]
fn a_reload_enables_a_recorded_route() {
    let recorded = format!("{DISABLES}[record]\ndirectory = \"recording\"\n");
    let server = Server::with(&recorded);
    let (status, reloaded) = server.reload(&recorded);
    assert_eq!((status, &reloaded["unchanged"]), (200, &json!(["r"])), "{reloaded}");
    disable(&server);
    let (status, reloaded) = server.reload(&recorded);
    assert_eq!((status, &reloaded["changed"]), (200, &json!(["r"])), "{reloaded}");
    ask(server.address, 0, || ()).expect("an answer");
    let (status, refused) = server.reload(&recorded.replace("\"finished\"", "\"\""));
    let message = refused["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 409 && message.contains("[routes.r] has changed, and it is recorded"), "{status}: {refused}");
}

#[test]
fn a_signal_reloads() {
    let server = Server::start();
    let hang_up = || {
        let process = server.child.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &process]).status().expect("`kill` is there").success());
    };
    let wait_for = |what: &str, is: &dyn Fn() -> bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is() {
            assert!(Instant::now() < deadline, "{what}: {}", log_of(server.directory.path()));
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let plugin = || server.admin("GET /admin/routes").1["routes"].to_string().contains("\"plugin\":\"r2r\"");
    assert!(!plugin());
    write(server.directory.path(), POLICIES[1]);
    hang_up();
    wait_for("the other policy", &plugin);
    let (broken, says) = BROKEN[0];
    write(server.directory.path(), broken);
    hang_up();
    let logged = || {
        let log = log_of(server.directory.path());
        log.lines().any(|line| line.contains("configuration not reloaded") && line.contains(says))
    };
    wait_for("the refusal", &logged);
    assert!(plugin());
}
