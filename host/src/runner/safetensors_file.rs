//! A safetensors file: its header, checked against its size.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use safetensors::tensor::Metadata;

use super::model_config::LoadError;

/// Larger headers are refused before memory is taken for them.
const MAX_HEADER: u64 = 100 << 20;

/// An open file.
pub(crate) struct SafetensorsFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) header: Metadata,
    /// Where the offsets of the header count from.
    pub(crate) data_start: u64,
}

impl SafetensorsFile {
    pub(crate) fn open(path: PathBuf) -> Result<Self, LoadError> {
        let unreadable = |e: std::io::Error| LoadError::new(&path, format!("cannot be read: {e}"));
        let mut file = File::open(&path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        let mut length = [0; 8];
        let short = || LoadError::new(&path, format!("is no safetensors file ({size} bytes); download it again"));
        file.read_exact(&mut length).map_err(|_| short())?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > size.saturating_sub(8) {
            return Err(LoadError::new(
                &path,
                format!(
                    "says its header has {length} bytes, but the file has {size}: it is damaged or no safetensors file; download it again"
                ),
            ));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(unreadable)?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|e| LoadError::new(&path, format!("has a damaged header ({e}); download it again")))?;
        let data_start = 8 + length;
        // Sizes in the header may add up to nearly 2^64.
        let expected = u128::from(data_start) + header.data_len() as u128;
        if expected != u128::from(size) {
            return Err(LoadError::new(
                &path,
                format!(
                    "has {size} bytes, but its header describes {expected}: it is cut off or damaged; download it again"
                ),
            ));
        }
        Ok(Self { path, file, header, data_start })
    }
}
