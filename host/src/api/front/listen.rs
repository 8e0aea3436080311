//! Where connections come from.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::{Peer, Tls};

/// Connections by a Unix socket that wait to be taken.
const BACKLOG: u32 = 1024;
/// Longest wait for a place among connections that another program has not taken yet.
const QUEUE_TIME: Duration = Duration::from_secs(1);

/// An address, a Unix socket, or both.
#[derive(Default)]
pub struct Listener {
    pub tcp: Option<TcpListener>,
    /// For connections by TCP.
    pub tls: Option<Arc<Tls>>,
    pub unix: Option<UnixSocket>,
}

impl From<TcpListener> for Listener {
    fn from(tcp: TcpListener) -> Self {
        Self { tcp: Some(tcp), ..Self::default() }
    }
}

pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    /// The next connection. Nothing is lost if the future is dropped.
    pub(in crate::api) async fn accept(&self) -> io::Result<(Stream, Peer)> {
        let tcp = async {
            match &self.tcp {
                Some(tcp) => tcp.accept().await,
                None => std::future::pending().await,
            }
        };
        let unix = async {
            match &self.unix {
                Some(unix) => unix.listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            accepted = tcp => accepted.map(|(stream, address)| (Stream::Tcp(stream), address.ip().into())),
            accepted = unix => accepted.map(|(stream, _)| (Stream::Unix(stream), Peer::Local)),
        }
    }
}

/// Why there is no Unix socket at a path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("another program listens there; stop it, or choose another path")]
    InUse,
    #[error("is not a socket; choose another path")]
    Other,
    #[error("cannot listen there: {0}; choose another path")]
    Io(#[from] io::Error),
}

/// A Unix socket at a path, which goes when this is dropped.
pub struct UnixSocket {
    listener: UnixListener,
    _file: SocketFile,
}

/// The file of a socket, removed when dropped unless another one has its place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|identity| identity == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(%error, path = %self.path.display(), "the socket could not be removed");
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Connect to `path`. Whoever lets others wait longer than a moment, since the queue is full, is there as well.
fn reach(path: &Path) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    let path = path.to_owned();
    // It ends with the process where its connection waits for ever.
    thread::spawn(move || sender.send(std::os::unix::net::UnixStream::connect(path).map(drop)));
    receiver.recv_timeout(QUEUE_TIME).unwrap_or(Ok(()))
}

impl UnixSocket {
    /// Whether there can be one at `path`: nothing is there, or a socket at which nobody listens.
    pub fn check(path: &Path) -> Result<(), SocketError> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
            Ok(found) if !found.file_type().is_socket() => Err(SocketError::Other),
            Ok(_) => match reach(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
                Ok(()) => Err(SocketError::InUse),
                // One whom this user may not reach.
                Err(error) => Err(error.into()),
            },
        }
    }

    /// Listen at `path`, for users that `mode` lets write. In a runtime.
    pub fn bind(path: &Path, mode: u32) -> Result<Self, SocketError> {
        Self::check(path)?;
        // It listens when it has its mode, so nobody else can ever reach it, and then takes the place of a stale one.
        let mut new = path.as_os_str().to_owned();
        new.push(format!(".{}", std::process::id()));
        let new = PathBuf::from(new);
        // One that a process of this number left.
        Self::check(&new)?;
        if let Err(error) = fs::remove_file(&new)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error.into());
        }
        let socket = tokio::net::UnixSocket::new_stream()?;
        socket.bind(&new)?;
        let placed = fs::set_permissions(&new, fs::Permissions::from_mode(mode))
            .and_then(|()| socket.listen(BACKLOG))
            .and_then(|listener| fs::rename(&new, path).map(|()| listener))
            .and_then(|listener| Ok((listener, identity(path)?)));
        let (listener, identity) = placed.inspect_err(|_| drop(fs::remove_file(&new)))?;
        Ok(Self { listener, _file: SocketFile { path: path.into(), identity } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let own = directory.path().join(format!("s.{}", std::process::id()));
        drop(std::os::unix::net::UnixListener::bind(&own).unwrap());
        assert!(path.exists() && own.exists(), "stale");
        let socket = UnixSocket::bind(&path, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(UnixSocket::bind(&path, 0o600), Err(SocketError::InUse)));
        let listener = Listener { unix: Some(socket), ..Listener::default() };
        let _client = UnixStream::connect(&path).await.unwrap();
        // The first is the look of the second bind.
        for _ in 0..2 {
            assert_eq!(listener.accept().await.unwrap().1, Peer::Local);
        }
        drop(listener);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
        fs::write(&path, "a file").unwrap();
        assert!(matches!(UnixSocket::bind(&path, 0o600), Err(SocketError::Other)));
    }

    /// One that is alive, though it takes nobody.
    #[tokio::test]
    async fn a_socket_with_a_full_queue_is_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let socket = tokio::net::UnixSocket::new_stream().unwrap();
        socket.bind(&path).unwrap();
        let _listener = socket.listen(0).unwrap();
        let _first = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let second = UnixStream::connect(&path).await.unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::WouldBlock, "the queue is full");
        assert!(matches!(UnixSocket::check(&path), Err(SocketError::InUse)));
    }

    #[tokio::test]
    async fn the_socket_of_a_successor_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = UnixSocket::bind(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        let second = UnixSocket::bind(&path, 0o600).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }
}
