//! Standard error behind a thread of its own: whoever logs never waits and never fails, whether standard
//! error is a full disk, a pipe without a reader, or a pipe that nobody empties.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

/// Lines that wait for the writer; what comes beyond them is left out, and their number told.
const WAITING: usize = 4096;
/// Longest wait at the end for lines that are not yet written.
const LAST_LINES: Duration = Duration::from_secs(1);

enum Message {
    Line(Vec<u8>),
    /// Answered when all before it is written.
    Flush(Sender<()>),
}

/// Owns the writer. Dropping it waits for what has been logged, for a bounded time.
pub struct StderrLines(LineSink);

/// Where lines are put; one `write` is one line, written whole or left out.
#[derive(Clone)]
pub struct LineSink {
    messages: Sender<Message>,
    left_out: Arc<AtomicU64>,
}

impl StderrLines {
    pub fn start() -> io::Result<Self> {
        Self::over(io::stderr())
    }

    fn over(to: impl Write + Send + 'static) -> io::Result<Self> {
        let (messages, received) = bounded(WAITING);
        let sink = LineSink { messages, left_out: Arc::default() };
        let left_out = sink.left_out.clone();
        std::thread::Builder::new().name("stderr".into()).spawn(move || write_lines(&received, &left_out, to))?;
        Ok(Self(sink))
    }

    pub fn sink(&self) -> LineSink {
        self.0.clone()
    }

    /// The last line of a command: there is time to wait for room.
    pub fn last(&self, line: String) {
        // Where it cannot be written there is nowhere to say so.
        let _ = self.0.messages.send_timeout(Message::Line(line.into_bytes()), LAST_LINES);
    }
}

impl Drop for StderrLines {
    fn drop(&mut self) {
        let (done, written) = bounded(1);
        if self.0.messages.send_timeout(Message::Flush(done), LAST_LINES).is_ok() {
            let _ = written.recv_timeout(LAST_LINES);
        }
    }
}

impl LineSink {
    pub fn put(&self, line: Vec<u8>) {
        if self.messages.try_send(Message::Line(line)).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Write for LineSink {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.put(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Failed writes are passed over: there is nowhere to report them, and the next may succeed.
fn write_lines(received: &Receiver<Message>, left_out: &AtomicU64, mut to: impl Write) {
    for message in received {
        match message {
            Message::Line(line) => {
                let _ = to.write_all(&line);
                let missing = left_out.swap(0, Ordering::Relaxed);
                if missing > 0 {
                    let _ = writeln!(to, "{missing} log lines were left out: standard error was not read in time");
                }
            }
            Message::Flush(done) => {
                let _ = to.flush();
                let _ = done.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_are_written_in_order_before_the_end() {
        let shared = Shared::default();
        let lines = StderrLines::over(shared.clone()).unwrap();
        lines.sink().put(b"one\n".to_vec());
        lines.last("two\n".into());
        drop(lines);
        assert_eq!(*shared.0.lock().unwrap(), b"one\ntwo\n");
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let shared = Shared::default();
        let lines = StderrLines::over(shared.clone()).unwrap();
        let held = shared.0.lock().unwrap();
        // One line is with the writer at most, the others fill the queue.
        for _ in 0..WAITING + 10 {
            lines.sink().put(b"x\n".to_vec());
        }
        drop(held);
        drop(lines);
        let written = String::from_utf8(shared.0.lock().unwrap().clone()).unwrap();
        let lost: u64 = written.lines().filter_map(|l| l.split_once(" log lines")?.0.parse::<u64>().ok()).sum();
        let kept = written.lines().filter(|l| *l == "x").count() as u64;
        assert!(lost >= 9, "{lost}");
        assert_eq!(kept + lost, WAITING as u64 + 10);
    }

    #[test]
    fn failed_writes_are_passed_over() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let lines = StderrLines::over(Broken).unwrap();
        lines.sink().put(b"one\n".to_vec());
        lines.sink().write_all(b"two\n").unwrap();
        let (done, written) = bounded(1);
        lines.0.messages.send(Message::Flush(done)).unwrap();
        assert_eq!(written.recv(), Ok(()));
    }
}
