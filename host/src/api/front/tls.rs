//! TLS: what it needs from files, and the certificates in force.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

/// Files in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, then those between it and the authority's.
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Clients need a certificate of one of these authorities.
    pub client_ca: Option<PathBuf>,
}

/// Which file is at fault, and why.
#[derive(Debug, PartialEq, Eq)]
pub struct TlsError {
    field: &'static str,
    file: PathBuf,
    fault: String,
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "server.tls.{} = {:?}: {}", self.field, self.file.display().to_string(), self.fault)
    }
}

impl std::error::Error for TlsError {}

impl TlsError {
    /// The key under `server.tls` that gives the file.
    pub fn field(&self) -> &'static str {
        self.field
    }
}

fn pem_fault(error: &pem::Error, wanted: &str) -> String {
    match error {
        pem::Error::Io(error) => format!("cannot be read: {error}"),
        pem::Error::NoItemsFound => format!("has no {wanted}; give a file in PEM"),
        error => format!("is not PEM: {error}"),
    }
}

impl TlsFiles {
    /// Read the files, and check that they go together.
    pub fn read(&self) -> Result<Certificates, TlsError> {
        let fault = |field, file: &Path, fault: String| TlsError { field, file: file.into(), fault };
        let certificates = |field, file: &Path| -> Result<Vec<CertificateDer<'static>>, TlsError> {
            let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
            match read {
                Ok(found) if found.is_empty() => Err(pem::Error::NoItemsFound),
                read => read,
            }
            .map_err(|error| fault(field, file, pem_fault(&error, "certificate")))
        };
        let chain = certificates("cert", &self.cert)?;
        let key = PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|error| fault("key", &self.key, pem_fault(&error, "private key")))?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| fault("cert", &self.cert, error.to_string()))?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let wrong = |error: &dyn fmt::Display| fault("client_ca", file, error.to_string());
                let mut roots = RootCertStore::empty();
                for authority in certificates("client_ca", file)? {
                    roots.add(authority).map_err(|error| wrong(&error))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|error| wrong(&error))?)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|error| {
            let cert = self.cert.display();
            fault("key", &self.key, format!("does not go with the certificate in {cert}: {error}"))
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config.into())
    }
}

/// What files came to.
pub type Certificates = Arc<ServerConfig>;

/// The certificates in force for new connections.
pub struct Tls(ArcSwap<ServerConfig>);

impl Tls {
    pub fn new(config: Certificates) -> Self {
        Self(ArcSwap::new(config))
    }

    pub fn set(&self, config: Certificates) {
        self.0.store(config);
    }

    pub(in crate::api) async fn accept<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        TlsAcceptor::from(self.0.load_full()).accept(stream).await
    }
}
