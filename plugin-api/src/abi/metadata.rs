//! What a host can read of a plugin without running it: one record in the link section
//! `.tokenrouter`. Numbers are little-endian, texts are padded with zeros.

use super::{ABI_VERSION, AbiVersion};

/// Name of the link section.
pub const SECTION: &str = ".tokenrouter";
/// Size of the record.
pub const BYTES: usize = 32 + 3 * TEXT;

const MAGIC: &[u8; 16] = b"TOKENROUTER-PLUG";
/// Changes with the layout of this record.
const LAYOUT: u32 = 1;
const TEXT: usize = 64;

/// The record of one plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// The ABI the plugin was built with.
    pub abi: AbiVersion,
    /// The lowest minor version of a host that can run it.
    pub min_host_minor: u32,
    /// Name of the method.
    pub name: String,
    /// Version of the plugin's crate.
    pub version: String,
    /// Symbol of the plugin's header.
    pub symbol: String,
}

/// Why a record cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetadataError {
    /// The section has another size than one record.
    Size(usize),
    /// The section does not begin with the magic text.
    Magic,
    /// The record has another layout than this version knows.
    Layout(u32),
    /// A text is empty, not UTF-8, or has control characters.
    Text(&'static str),
}

impl std::fmt::Display for MetadataError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Size(n) => write!(
                f,
                "section {SECTION} holds {n} bytes where one plugin has {BYTES}; export exactly one policy from a library"
            ),
            Self::Magic => write!(f, "section {SECTION} does not begin with {}", MAGIC.escape_ascii()),
            Self::Layout(n) => write!(
                f,
                "plugin metadata has layout {n}, this server reads layout {LAYOUT}; rebuild the plugin with \
                 tokenrouter-plugin-api {ABI_VERSION}"
            ),
            Self::Text(field) => write!(f, "plugin metadata has no readable {field}; rebuild the plugin"),
        }
    }
}

/// The record of a plugin built with this crate.
pub const fn encode(name: &str, version: &str, symbol: &str) -> [u8; BYTES] {
    let mut out = [0; BYTES];
    put(&mut out, 0, MAGIC);
    put(&mut out, 16, &LAYOUT.to_le_bytes());
    put(&mut out, 20, &ABI_VERSION.major.to_le_bytes());
    put(&mut out, 24, &ABI_VERSION.minor.to_le_bytes());
    put(&mut out, 28, &ABI_VERSION.minor.to_le_bytes());
    assert!(
        !name.is_empty() && name.len() <= TEXT && version.len() <= TEXT && symbol.len() <= TEXT,
        "Policy::NAME, the crate's name or its version is empty or longer than 64 bytes"
    );
    put(&mut out, 32, name.as_bytes());
    put(&mut out, 32 + TEXT, version.as_bytes());
    put(&mut out, 32 + 2 * TEXT, symbol.as_bytes());
    out
}

const fn put(out: &mut [u8; BYTES], at: usize, bytes: &[u8]) {
    let mut i = 0;
    while i < bytes.len() {
        out[at + i] = bytes[i];
        i += 1;
    }
}

/// Read a record.
pub fn decode(section: &[u8]) -> Result<Metadata, MetadataError> {
    if !section.starts_with(MAGIC) {
        return Err(MetadataError::Magic);
    }
    let number = |at: usize| section.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    if let Some(layout) = number(16).filter(|&layout| layout != LAYOUT) {
        return Err(MetadataError::Layout(layout));
    }
    let (Some(major), Some(minor), Some(min_host_minor), BYTES) = (number(20), number(24), number(28), section.len())
    else {
        return Err(MetadataError::Size(section.len()));
    };
    let text = |index: usize, field: &'static str| {
        let bytes = &section[32 + index * TEXT..][..TEXT];
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(TEXT);
        match std::str::from_utf8(&bytes[..end]) {
            Ok(text) if !text.is_empty() && !text.contains(char::is_control) => Ok(text.to_owned()),
            _ => Err(MetadataError::Text(field)),
        }
    };
    Ok(Metadata {
        abi: AbiVersion { major, minor },
        min_host_minor,
        name: text(0, "name")?,
        version: text(1, "version")?,
        symbol: text(2, "symbol")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        let record = encode("rstitch", "0.3.1", "tokenrouter_plugin_rstitch");
        let expected = Metadata {
            abi: ABI_VERSION,
            min_host_minor: ABI_VERSION.minor,
            name: "rstitch".into(),
            version: "0.3.1".into(),
            symbol: "tokenrouter_plugin_rstitch".into(),
        };
        assert_eq!(decode(&record), Ok(expected));
    }

    #[test]
    fn fills_a_text_field_to_the_last_byte() {
        let name = "n".repeat(TEXT);
        assert_eq!(decode(&encode(&name, "1", "s")).unwrap().name, name);
    }

    #[test]
    fn refuses_damaged_records() {
        let record = encode("a", "1", "s");
        assert_eq!(decode(&[]), Err(MetadataError::Magic));
        assert_eq!(decode(&record[..20]), Err(MetadataError::Size(20)));
        assert_eq!(decode(&[record, record].concat()), Err(MetadataError::Size(2 * BYTES)));
        let patched = |at: usize, value: u8| {
            let mut record = record;
            record[at] = value;
            decode(&record)
        };
        assert_eq!(patched(0, b'X'), Err(MetadataError::Magic));
        assert_eq!(patched(16, 9), Err(MetadataError::Layout(9)));
        assert_eq!(patched(32, 0xff), Err(MetadataError::Text("name")));
        assert_eq!(patched(32, 0), Err(MetadataError::Text("name")));
        assert_eq!(patched(32, 0x1b), Err(MetadataError::Text("name")));
    }
}
