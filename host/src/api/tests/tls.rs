//! Connections with TLS.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::fixture::Server;
use crate::api::front::Refusal;
use crate::api::{Limits, Listener, Tls, TlsFiles, serve};

fn file(name: &str) -> PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

fn files(name: &str) -> TlsFiles {
    TlsFiles { cert: file(&format!("{name}.pem")), key: file(&format!("{name}.key")), client_ca: None }
}

async fn start(server: &Server, tls: &Arc<Tls>) -> SocketAddr {
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap();
    let listener = Listener { tcp: Some(tcp), tls: Some(tls.clone()), unix: None };
    tokio::spawn(serve(listener, server.state.clone(), std::future::pending()));
    address
}

/// Answer to GET /health, and the server's certificate.
fn health(address: SocketAddr, certificate: bool) -> io::Result<(String, CertificateDer<'static>)> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file("ca.pem")).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(ring::default_provider().into());
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let mut config = match certificate {
        false => builder.with_no_client_auth(),
        true => {
            let chain = vec![CertificateDer::from_pem_file(file("client.pem")).unwrap()];
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(file("client.key")).unwrap()).unwrap()
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let client = ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap()).unwrap();
    let mut stream = StreamOwned::new(client, TcpStream::connect(address)?);
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    assert_eq!(stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
    let shown = stream.conn.peer_certificates().unwrap()[0].clone().into_owned();
    Ok((answer, shown))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_renewed_without_a_restart() {
    let server = Server::saying("ok");
    let tls = Arc::new(Tls::new(files("server").read().unwrap()));
    let address = start(&server, &tls).await;
    let (answer, first) = health(address, false).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    tls.set(files("renewed").read().unwrap());
    let (answer, second) = health(address, false).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && first != second, "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_with_certificates_alone() {
    let server = Server::saying("ok");
    let tls = Arc::new(Tls::new(TlsFiles { client_ca: Some(file("ca.pem")), ..files("server") }.read().unwrap()));
    let address = start(&server, &tls).await;
    assert!(health(address, false).is_err());
    let (answer, _) = health(address, true).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handshake_does_not_last_for_ever() {
    let mut server = Server::saying("ok");
    let front = &mut Arc::get_mut(&mut server.state).unwrap().front;
    front.limits = Limits { header_timeout: Duration::from_millis(50), ..Limits::default() };
    let tls = Arc::new(Tls::new(files("server").read().unwrap()));
    let address = start(&server, &tls).await;
    let mut silent = TcpStream::connect(address).unwrap();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
    let mut plain = TcpStream::connect(address).unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // An alert, or a reset.
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"));
    // It is counted right after the client sees it.
    let counted = || server.state.front.counters.get(Refusal::Handshake);
    for _ in 0..500 {
        if counted() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    assert_eq!(counted(), 2);
}

#[test]
fn faults_name_the_file() {
    let fault = |files: TlsFiles| files.read().unwrap_err().to_string();
    let told = fault(TlsFiles { cert: "nowhere.pem".into(), ..files("server") });
    assert!(told.starts_with("server.tls.cert = \"nowhere.pem\": cannot be read: "), "{told}");
    let told = fault(TlsFiles { cert: file("server.key"), ..files("server") });
    assert!(told.ends_with("has no certificate; give a file in PEM"), "{told}");
    let told = fault(TlsFiles { key: file("ca.pem"), ..files("server") });
    assert!(told.starts_with("server.tls.key = ") && told.contains("has no private key"), "{told}");
    let told = fault(TlsFiles { key: file("client.key"), ..files("server") });
    assert!(told.contains("does not go with the certificate in "), "{told}");
    let told = fault(TlsFiles { client_ca: Some(file("client.key")), ..files("server") });
    assert!(told.starts_with("server.tls.client_ca = "), "{told}");
}
