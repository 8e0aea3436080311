//! Listening where a configuration says, with errors that name the key.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::{fmt, io};

use tokio::net::{TcpListener, TcpSocket};

use super::output::Failure;
use crate::api::UnixSocket;
use crate::config::Config;

/// Connections that wait to be taken.
const BACKLOG: u32 = 1024;

/// An address that is bound while the server loads. Nobody listens there yet, so whoever comes early is refused
/// and not left waiting.
pub struct Place {
    socket: TcpSocket,
    address: SocketAddr,
    fault: fn(SocketAddr, &io::Error) -> String,
}

impl Place {
    /// For all endpoints.
    pub fn main(address: SocketAddr) -> Result<Self, Failure> {
        Self::at(address, main_fault)
    }

    /// For the admin endpoints; `main`: where all others are, if anywhere.
    pub fn admin(address: SocketAddr, main: Option<SocketAddr>) -> Result<Self, Failure> {
        // The system sees that only once somebody listens.
        if let Some(main) = main.filter(|main| overlap(*main, address)) {
            let why = format!("the server's own address {main} covers it");
            return Err(Failure::input(admin_fault(address, &why)));
        }
        Self::at(address, admin_fault)
    }

    fn at(address: SocketAddr, fault: fn(SocketAddr, &io::Error) -> String) -> Result<Self, Failure> {
        let bound = || {
            let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            // Connections of a server before this one that are about to end are in nobody's way; a listener is.
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            Ok(socket)
        };
        let socket = bound().map_err(|error| Failure::input(fault(address, &error)))?;
        Ok(Self { socket, address, fault })
    }

    /// Take connections. Another program that allows the reuse of addresses may have come first, so that a later start
    /// may do better.
    pub fn listen(self) -> Result<TcpListener, Failure> {
        let Self { socket, address, fault } = self;
        socket.listen(BACKLOG).map_err(|error| Failure::work(fault(address, &error)))
    }
}

/// Whether who comes to one of two addresses may mean the other.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let covers = |ip: IpAddr, other: IpAddr| ip.is_unspecified() && (ip.is_ipv6() || other.is_ipv4());
    let [(a, port), (b, port_b)] = [one, other].map(|address| (address.ip().to_canonical(), address.port()));
    port != 0 && port == port_b && (a == b || covers(a, b) || covers(b, a))
}

fn main_fault(address: SocketAddr, error: &io::Error) -> String {
    let port = address.port();
    match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "server.port = {port}: {address} is in use; stop the program that listens there, or choose another port with --port"
        ),
        io::ErrorKind::PermissionDenied => {
            format!("server.port = {port}: ports below 1024 need rights; choose another with --port")
        }
        io::ErrorKind::AddrNotAvailable => {
            format!("server.host = \"{}\": this machine has no such address; try --host 127.0.0.1", address.ip())
        }
        _ => format!("cannot listen at {address}: {error}"),
    }
}

fn admin_fault(address: SocketAddr, why: &impl fmt::Display) -> String {
    format!("server.admin = \"{address}\": cannot listen there ({why}); choose another address")
}

/// The path of `server.unix_socket` and its mode.
pub fn socket_path(config: &Config) -> Option<(PathBuf, u32)> {
    let (path, mode) = config.server.front.unix_socket.as_ref()?;
    Some((config.directory().join(path), *mode))
}

/// Whether there can be a socket where the configuration wants one.
pub fn check_socket(config: &Config) -> Result<(), Failure> {
    let Some((path, _)) = socket_path(config) else { return Ok(()) };
    UnixSocket::check(&path).map_err(|error| socket_failure(config, &path.display().to_string(), &error))
}

pub fn bind_socket(config: &Config) -> Result<Option<UnixSocket>, Failure> {
    let Some((path, mode)) = socket_path(config) else { return Ok(None) };
    let bound = UnixSocket::bind(&path, mode);
    bound.map(Some).map_err(|error| socket_failure(config, &path.display().to_string(), &error))
}

fn socket_failure(config: &Config, path: &str, error: &crate::api::SocketError) -> Failure {
    Failure::input(format!("{}: server.unix_socket = {path:?}: {error}", config.file.display()))
}

/// Warn where the process may not open as many files as connections may be open.
pub fn check_files(config: &Config) {
    const OTHERS: u64 = 128;
    let connections = config.server.front.limits.connections as u64;
    let limit = std::fs::read_to_string("/proc/self/limits").ok().and_then(|text| open_files(&text));
    if let Some(limit) = limit.filter(|limit| connections + OTHERS > *limit) {
        tracing::warn!(
            "server.max_connections = {connections}, but the process may open {limit} files only; raise `ulimit -n` or \
             lower server.max_connections"
        );
    }
}

/// The soft limit in the text of `/proc/self/limits`; `None` without a limit.
pub fn open_files(limits: &str) -> Option<u64> {
    limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nobody_is_taken_before_the_server_listens() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let place = Place::main(free).unwrap();
        let early = std::net::TcpStream::connect(free).unwrap_err();
        assert_eq!(early.kind(), io::ErrorKind::ConnectionRefused);
        let listener = place.listen().unwrap();
        assert_eq!(listener.local_addr().unwrap(), free);
        std::net::TcpStream::connect(free).unwrap();
        // Who listens is seen at once, by both.
        let taken = Place::main(free).err().unwrap().line();
        assert!(taken.contains(&format!("{free} is in use")), "{taken}");
        let taken = Place::admin(free, None).err().unwrap().line();
        assert!(taken.contains(&format!("server.admin = \"{free}\": cannot listen there (")), "{taken}");
    }

    #[tokio::test]
    async fn of_two_that_start_at_once_one_listens() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let [first, second] = [Place::main(free), Place::main(free)].map(Result::unwrap);
        let _listener = first.listen().unwrap();
        let refused = second.listen().unwrap_err().line();
        assert!(refused.contains(&format!("{free} is in use")), "{refused}");
    }

    #[test]
    fn addresses_in_each_others_way() {
        for (one, other, expected) in [
            ("127.0.0.1:80", "127.0.0.1:80", true),
            ("127.0.0.1:80", "127.0.0.1:81", false),
            ("127.0.0.1:80", "127.0.0.2:80", false),
            ("0.0.0.0:80", "127.0.0.1:80", true),
            ("0.0.0.0:80", "[::1]:80", false),
            ("[::]:80", "127.0.0.1:80", true),
            ("[::]:80", "[::1]:80", true),
            ("[::ffff:127.0.0.1]:80", "127.0.0.1:80", true),
            ("127.0.0.1:0", "127.0.0.1:0", false),
        ] {
            let [one, other] = [one, other].map(|address| address.parse().unwrap());
            assert_eq!([overlap(one, other), overlap(other, one)], [expected; 2], "{one} {other}");
        }
    }

    #[test]
    fn the_limit_on_files() {
        let text = |soft| {
            format!("Limit  Soft  Hard  Units\nMax processes 1 2 p\nMax open files            {soft} 4096  files\n")
        };
        assert_eq!(open_files(&text("1024")), Some(1024));
        assert_eq!(open_files(&text("unlimited")), None);
        assert_eq!(open_files(""), None);
    }
}
