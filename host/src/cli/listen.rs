//! Listening where a configuration says, with errors that name the key.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio::net::TcpListener;

use super::output::Failure;
use crate::api::UnixSocket;
use crate::config::Config;

pub async fn bind(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|e| {
        let port = address.port();
        Failure::input(match e.kind() {
            io::ErrorKind::AddrInUse => format!(
                "server.port = {port}: {address} is in use; stop the program that listens there, or choose another port with --port"
            ),
            io::ErrorKind::PermissionDenied => {
                format!("server.port = {port}: ports below 1024 need rights; choose another with --port")
            }
            io::ErrorKind::AddrNotAvailable => {
                format!("server.host = \"{}\": this machine has no such address; try --host 127.0.0.1", address.ip())
            }
            _ => format!("cannot listen at {address}: {e}"),
        })
    })
}

pub async fn bind_admin(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|e| {
        Failure::input(format!("server.admin = \"{address}\": cannot listen there ({e}); choose another address"))
    })
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
