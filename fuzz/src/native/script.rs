//! Reads steps and their arguments from bytes; a script ends with its bytes.

pub struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    pub fn new(input: &'a [u8]) -> Script<'a> {
        Script(input)
    }

    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Returns a number from 0 to 255; 0 at the end of the script.
    pub fn small(&mut self) -> u64 {
        self.byte().unwrap_or(0).into()
    }

    /// Returns as many bytes as the next two bytes say, or the rest.
    pub fn bytes(&mut self) -> &'a [u8] {
        let wanted = usize::from(self.byte().unwrap_or(0)) | usize::from(self.byte().unwrap_or(0)) << 8;
        let (taken, rest) = self.0.split_at(wanted.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Returns one of the elements.
    pub fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        let at = usize::from(self.byte().unwrap_or(0)) % all.len();
        all[at].clone()
    }
}
